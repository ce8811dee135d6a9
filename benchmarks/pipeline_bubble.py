"""Measures idle time, micro-batches in flight and memory of pipelines, and prints a table.

`python benchmarks/pipeline_bubble.py [--stages=4] [--micro_batches=1,4,8] [--memory_batch=2048]`.
The stages are padded by sleeping, 20 ms forward and 40 ms backward, so that they take equally long
and do not compete for the cores of one processor. Memory is the peak during steps minus the memory
before them, for LeNet in two stages with eight micro-batches, with a separate process for each
schedule.
"""

import argparse
import pathlib
import sys

ROOT = pathlib.Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from app.config import TrainConfig
from app.performance.case import Case
from app.performance.pipeline_timeline import bubble, theoretical_in_flight
from app.performance.rounds import measure
from app.performance.split_profile import time_padded_pipeline
from app.runtime.processes import call_in_child_process
from app.runtime.progress_bar import StepProgress

SCHEDULES = "gpipe", "1f1b"
MOST_APART = 0.03  # The theory ignores computation and late wake-ups.


def create_config(**options: object) -> TrainConfig:
    """Returns a pipeline training on generated images."""
    return TrainConfig(strategy="pipeline", device="cpu", dataset="synthetic", **options)


def print_idle_times(num_stages: int, micro_batches: list[int]) -> bool:
    """Measures all numbers of micro-batches and schedules; returns whether the theory holds."""
    print(f"{num_stages} padded stages; shares of idle time, and micro-batches in flight")
    print("   M schedule  idle  theory  apart  in flight      theory")
    is_met = True
    for number in micro_batches:
        for schedule in SCHEDULES:
            config = create_config(
                num_devices=num_stages, micro_batches=number, schedule=schedule,
                global_batch_size=2 * number, num_train_examples=100 * number,
            )  # fmt: skip
            timed = call_in_child_process(time_padded_pipeline, config)
            theory = bubble(num_stages, number)
            in_flight = theoretical_in_flight(schedule, num_stages, number)
            apart = timed.idle - theory
            is_met &= abs(apart) <= MOST_APART and timed.in_flight == in_flight
            print(
                f"{number:4} {schedule:8} {timed.idle:.3f}   {theory:.3f} {apart:+.3f} "
                f" {timed.in_flight!s:14} {in_flight}"
            )
    return is_met


def print_memory(global_batch_size: int) -> None:
    """Measures the memory of both schedules, and of recomputation."""
    print(f"\nmemory of a step: LeNet, K = 2, M = 8, batch {global_batch_size}")
    configs = {
        f"{schedule}{', recompute' if recompute else ''}": create_config(
            num_devices=2, micro_batches=8, schedule=schedule, recompute=recompute,
            global_batch_size=global_batch_size, last_batch="drop",
            num_train_examples=global_batch_size,
        )
        for schedule in SCHEDULES
        for recompute in (False, True)
    }  # fmt: skip
    cases = [Case(config, reads_input=False) for config in configs.values()]
    with StepProgress(1) as progress:
        samples = measure(cases, repeats=2, progress=progress).samples
    for name, sample in zip(configs, samples, strict=True):
        steps_bytes = sample.memory.steps_bytes
        shown = "not known here" if steps_bytes is None else f"{steps_bytes / 2**20:,.0f} MiB"
        print(f"  {name:18} {shown}")


def main() -> int:
    """Prints both tables; returns 1 if the theory does not hold."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--stages", type=int, default=4)
    parser.add_argument("--micro_batches", default="1,4,8")
    parser.add_argument("--memory_batch", type=int, default=2048, help="0 leaves memory out")
    options = parser.parse_args()
    numbers = [int(number) for number in options.micro_batches.split(",")]
    is_met = print_idle_times(options.stages, numbers)
    if options.memory_batch:
        print_memory(options.memory_batch)
    return 0 if is_met else 1


if __name__ == "__main__":
    sys.exit(main())
