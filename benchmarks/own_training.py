"""Serves the benchmark's requests with a training of Lockstep."""

import argparse
import pathlib
import sys
import time
from collections.abc import Sequence

sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))

from app.devices import device_setup
from app.options import Config
from protocol import claim_stdout, serve


def parse_config(arguments: Sequence[str]) -> Config:
    """Returns the training for the flags of a benchmark program."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="lenet")
    parser.add_argument("--strategy", default="manual")
    parser.add_argument("--global_batch_size", type=int, default=256)
    parser.add_argument("--num_devices", type=int, default=2)
    parser.add_argument("--schedule", default=argparse.SUPPRESS)
    parser.add_argument("--precision", default="float32")
    parser.add_argument("--recipe", default="d2l")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--data_dir", required=True)
    options = vars(parser.parse_args(arguments))
    if options["strategy"] == "single":
        del options["num_devices"]
    return Config.of("train", dataset="fashion_mnist", device="cpu", **options)


def main() -> None:
    """Builds a training from the flags, warms it up, and serves requests."""
    claim_stdout()
    config = parse_config(sys.argv[1:])
    prepared = device_setup.set_up(config)

    from app.runtime.versions import versions
    from app.training.evaluation import evaluate
    from app.training.training_spec import TrainingSpec, load_data

    dataset = load_data(config)
    spec = TrainingSpec(config, dataset)
    strategy = spec.build_strategy(prepared)
    state = strategy.state()
    strategy.train_steps(strategy.distribute(spec.batches()), 5)
    strategy.evaluate(dataset.batches_to_evaluate().take(1))  # Compiles it.
    strategy.load_state(state)  # Restores the initial state.
    iterator = strategy.distribute(spec.batches())

    def steps(num_steps: int) -> dict:
        start = time.perf_counter()
        totals = strategy.train_steps(iterator, num_steps)
        sec = time.perf_counter() - start
        return {"sec": sec, "images": totals.examples, "loss": totals.loss}

    def test() -> dict:
        start = time.perf_counter()
        accuracy = evaluate(strategy, dataset).accuracy
        return {"accuracy": accuracy, "sec": time.perf_counter() - start}

    serve(
        {
            "versions": versions(),
            "num_parameters": strategy.model.count_params(),
        },
        {"steps": steps, "evaluate": test},
    )


if __name__ == "__main__":
    main()
