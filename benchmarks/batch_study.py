"""Measures how the learning rate should grow with the batch size: prints a table of accuracies.

.venv/bin/python benchmarks/batch_study.py --model=lenet --epochs=4 --seeds=1,2
"""

import argparse
import dataclasses
import math
import os
import pathlib
import statistics
import sys
from typing import TYPE_CHECKING

sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

from app.config import TrainConfig
from app.config.names import MODEL_NAMES, PRECISIONS
from app.devices import device_setup
from app.training.recipes import RECIPES, find_recipe

if TYPE_CHECKING:  # Not imported before its devices are set up.
    from app.data.dataset import ImageDataset

RULES = ("linear", "square_root")


def main() -> None:
    """Trains with every batch size and rule, and prints a line of a Markdown table for each."""
    options = parse_options()
    base = TrainConfig(
        strategy="single",
        device="cpu",
        recipe="fast",
        model=options.model,
        epochs=options.epochs,
        num_train_examples=options.num_train_examples,
        precision=options.precision,
        data_dir=options.data_dir,
    )
    prepared = device_setup.set_up(base)
    from app.training.training_spec import load_data

    dataset = load_data(base)
    recipe = find_recipe("fast", options.model)
    print(
        "| batch | rule | peak learning rate | mean | accuracies |\n| --- | --- | --- | --- | --- |"
    )
    for size in map(int, options.batches.split(",")):
        for rule in options.rules.split(","):
            RECIPES["fast"][options.model] = dataclasses.replace(recipe, batch_rule=rule)
            results = []
            for seed in map(int, options.seeds.split(",")):
                config = dataclasses.replace(base, seed=seed, global_batch_size=size)
                results.append(train(config, prepared, dataset))
            accuracies = [accuracy for _, accuracy in results]
            shown = ", ".join(f"{accuracy:.4f}" for accuracy in accuracies)
            mean = f"{statistics.mean(accuracies):.4f}"
            print(f"| {size:,} | {rule} | {results[0][0]:.3g} | {mean} | {shown} |", flush=True)


def parse_options() -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=MODEL_NAMES, default="lenet")
    parser.add_argument("--batches", default="256,512,1024,2048,4096")
    parser.add_argument("--rules", default=",".join(RULES), help="default: %(default)s")
    parser.add_argument("--seeds", default="1,2")
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--num_train_examples", type=int)
    parser.add_argument("--precision", choices=PRECISIONS, default="float32")
    parser.add_argument("--data_dir")
    return parser.parse_args()


def train(
    config: TrainConfig, prepared: device_setup.Devices, dataset: "ImageDataset"
) -> tuple[float, float]:
    """Returns the peak learning rate and the test accuracy; NaN if the loss became infinite."""
    from app.training.evaluation import evaluate
    from app.training.training_spec import TrainingSpec

    spec = TrainingSpec(config, dataset)
    strategy = spec.build_strategy(prepared)
    iterator = strategy.distribute(spec.batches())
    for _ in range(config.epochs):
        totals = strategy.train_steps(iterator, spec.steps_per_epoch)
        if not math.isfinite(totals.loss_sum):
            return spec.learning_rate, math.nan
    return spec.learning_rate, evaluate(strategy, dataset).accuracy


if __name__ == "__main__":
    main()
