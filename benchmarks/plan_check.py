"""Compares the prediction of `plan` with measurements of local workers, in one interleaved run.

A single worker on one core gives the compute time, all-reduces of two workers give the cost of the
loopback; four workers are predicted from both and measured. Workers share the available cores: with
more workers, each computes proportionally longer.

`python benchmarks/plan_check.py [--model=lenet] [--rounds=7]`
"""

import argparse
import dataclasses
import pathlib
import sys

import numpy as np

ROOT = pathlib.Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from app.config import TrainConfig
from app.devices.device_setup import num_cores
from app.performance.all_reduce_model import AllReduceModel, LinearCost
from app.performance.case import Case
from app.performance.cluster_plan import Links, predict
from app.performance.rounds import measure
from app.runtime.progress_bar import StepProgress

BATCH = 256
COUNTS = (1, 2, 4)


def cases_of(model: str) -> tuple[dict[int, Case], list[Case]]:
    """Returns number of workers → the training, and one worker with the smaller shards."""
    config = TrainConfig(
        strategy="multi_worker",
        model=model,
        global_batch_size=BATCH,
        device="cpu",
        num_devices=1,
        last_batch="drop",
        num_train_examples=2000,
    )
    workers = {n: Case(config, num_workers=n, cores=min(n, num_cores())) for n in COUNTS}
    alone = [
        Case(dataclasses.replace(config, global_batch_size=BATCH // n), cores=1) for n in COUNTS[1:]
    ]
    return workers, alone


def main() -> None:
    """Measures, predicts, and prints both."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="lenet")
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    workers, alone = cases_of(options.model)
    with StepProgress(1) as progress:
        measured = measure(
            [*workers.values(), *alone],
            repeats=options.rounds,
            progress=progress,
            all_reduces_of=[workers[2]],
        )
    steps = [float(np.median(s.step_secs)) for s in measured.samples]
    compute = LinearCost.fit([BATCH, *(BATCH // n for n in COUNTS[1:])], [steps[0], *steps[3:]])
    loopback = AllReduceModel.fit("ring", measured.all_reduce_times)
    print(
        f"{options.model}: compute {compute.fixed_sec * 1e3:.2f} ms +"
        f" {compute.example_sec * 1e6:.0f} µs an image; loopback"
        f" {loopback.latency_sec * 1e6:.0f} µs, {1e-9 / loopback.sec_per_byte:.2f} GB/s"
    )
    links = Links(1 / loopback.sec_per_byte, loopback.latency_sec, 1 / loopback.sec_per_byte)
    for n, step_sec in zip(COUNTS, steps, strict=False):
        step = predict(
            compute,
            links,
            num_workers=n,
            devices_per_worker=1,
            global_batch_size=BATCH,
            size_bytes=measured.samples[0].facts.gradient_bytes,
        )
        turns = max(1.0, n / num_cores())
        predicted = step.compute_sec * turns + step.all_reduce_sec
        print(
            f"  {n} workers: predicted {predicted * 1e3:.1f} ms, measured {step_sec * 1e3:.1f} ms:"
            f" {predicted / step_sec - 1:+.1%}"
        )


if __name__ == "__main__":
    main()
