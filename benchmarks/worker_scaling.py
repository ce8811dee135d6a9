"""Measures the cost of the all-reduce between two workers, and their efficiency.

Each worker has one core. `python benchmarks/worker_scaling.py [--models=lenet] [--rounds=9]`;
needs two free cores. Prints, for each model, the step time of one worker, of two, and of two
without all-reduce; the ratio of the latter two; and the efficiency, one worker's time over twice
the time of two.
"""

import argparse
import pathlib
import sys

import numpy as np

ROOT = pathlib.Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from app.config import TrainConfig
from app.performance import interval
from app.performance.case import Case
from app.performance.rounds import measure
from app.runtime.progress_bar import StepProgress

BATCHES = {"lenet": 256, "resnet18": 64}


def create_cases(model: str, communication_dtype: str) -> list[Case]:
    """Returns one worker on one core, two on two, and two without all-reduce."""
    config = TrainConfig(
        strategy="multi_worker",
        model=model,
        global_batch_size=BATCHES[model],
        device="cpu",
        num_devices=1,
        last_batch="drop",
        num_train_examples=2000,
        communication_dtype=communication_dtype,
    )
    one, two = (Case(config, num_workers=n, cores=n) for n in (1, 2))
    return [one, two, Case(config, num_workers=2, no_sync=True, cores=2)]


def main() -> None:
    """Measures each model and prints the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", default="lenet,resnet18")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--communication_dtype", default="float32")
    options = parser.parse_args()
    for model in options.models.split(","):
        cases = create_cases(model, options.communication_dtype)
        with StepProgress(1) as progress:
            samples = measure(cases, repeats=options.rounds, progress=progress).samples
        one, two, without = (s.step_secs for s in samples)
        steps = (f"{np.median(secs) * 1e3:.1f}" for secs in (one, two, without))
        print(f"{model}, batch {BATCHES[model]}, exchanged in {options.communication_dtype}")
        print("  ms a step: one worker {}, two {}, two without exchange {}".format(*steps))
        print(f"  with exchange / without: {interval.ratio(two, without)}")
        efficiency = interval.combine(lambda a, b: a / b / 2, one, two)
        print(f"  efficiency of two: {efficiency}")


if __name__ == "__main__":
    main()
