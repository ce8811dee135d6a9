"""Measures the cost of a step over devices at constant work per device, and predicts the largest.

`python benchmarks/scaling_study.py [--rounds=12] [--devices=2,4,8,16] [--workers=1,2,4,6,8]
[--model=lenet] [--shard=32] [--json=runs/scaling_study.json]`

Measures logical devices of one process with every all-reduce of `manual` and with `mirrored`, in
one interleaved run; then local workers in another, because all processes together do not fit into
the memory of a small machine. For each kind, the cost of a step is fitted to all counts but the
largest, which is predicted and compared with its measurement: α + β · R + γ · log₂ R, or with γ · R
(R − 1) as the last term for rings and `direct`.

All devices share the cores of this machine, so that compute grows with their number: the fit tests
the method, not the scaling of real devices.
"""

import argparse
import dataclasses
import pathlib
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np

ROOT = pathlib.Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from app.config import TrainConfig
from app.config.names import MODEL_NAMES
from app.devices.device_setup import num_cores
from app.performance import interval
from app.performance.case import Case, Sample
from app.performance.rounds import measure
from app.performance.scaling_model import MIN_COUNTS, ScalingModel, is_pairwise
from app.records.files import write_json
from app.runtime import console
from app.runtime.progress_bar import StepProgress
from strategies import ALL_REDUCE_ALGORITHMS

BLOCK_SEC = 0.5  # Short blocks make more rounds; see `measure`.
KINDS = [
    *(("manual", algorithm) for algorithm in ALL_REDUCE_ALGORITHMS["manual"]),
    ("mirrored", "reduce_to_one"),
]


def create_config(strategy: str, model: str, global_batch_size: int, **options: Any) -> TrainConfig:
    """Returns a training on generated images with batches of equal size."""
    return TrainConfig(
        strategy=strategy,
        model=model,
        device="cpu",
        global_batch_size=global_batch_size,
        num_train_examples=global_batch_size,
        dataset="synthetic",
        last_batch="drop",
        **options,
    )


def device_cases(model: str, shard: int, counts: Sequence[int]) -> dict[str, list[Case]]:
    """Returns name of a kind → a case for each number of logical devices."""
    return {
        f"{strategy}, {algorithm}": [
            Case(
                create_config(strategy, model, shard * n, num_devices=n, all_reduce=algorithm),
                reads_input=False,
            )
            for n in counts
        ]
        for strategy, algorithm in KINDS
    }


def worker_cases(model: str, shard: int, counts: Sequence[int]) -> dict[str, list[Case]]:
    """Returns the cases of one device on each of several workers, by name of the kind.

    All workers share one core. With two cores, one worker would not use both, and two workers would
    take hardly longer than one.
    """
    cases = [
        Case(
            create_config("multi_worker", model, shard * n, num_devices=1),
            num_workers=n,
            reads_input=False,
            cores=1,
        )
        for n in counts
    ]
    return {"multi_worker, ring": cases} if cases else {}


@dataclasses.dataclass(frozen=True)
class Study:
    """The measurements of one kind over its counts, and the fitted model.

    Attributes:
        name: strategy and all-reduce.
        counts: numbers of devices, ascending.
        samples: one sample per count.
    """

    name: str
    counts: list[int]
    samples: list[Sample]

    @property
    def medians(self) -> list[float]:
        """Seconds per step, for each count."""
        return [float(np.median(sample.step_secs)) for sample in self.samples]

    @property
    def model(self) -> ScalingModel:
        """The model fitted to all counts but the largest."""
        return self._fit(self.medians[:-1])

    def _fit(self, secs: Sequence[float]) -> ScalingModel:
        return ScalingModel.fit(self.counts[:-1], secs, pairwise=self.pairwise)

    @property
    def pairwise(self) -> bool:
        """Whether messages between all pairs of devices share the cores."""
        return is_pairwise(self.samples[0].facts.all_reduce, shared=True)

    @property
    def predicted(self) -> interval.Interval:
        """Predicted seconds per step for the largest count."""
        smaller = [sample.step_secs for sample in self.samples[:-1]]
        predict = np.vectorize(lambda *secs: self._fit(secs).sec(self.counts[-1]))
        return interval.combine(predict, *smaller)

    def rows(self) -> list[list[str]]:
        """Returns the table's rows."""
        rows = []
        for count, sample in zip(self.counts, self.samples, strict=True):
            step, sec = interval.median(sample.step_secs), self.model.sec(count)
            error, predicted = f"{sec / step.value - 1:+.1%}", f"{1e3 * sec:,.1f}"
            if count == self.counts[-1]:
                error += ", held out"
                predicted += f" ({_ms(self.predicted)})"
            rows.append(
                [
                    self.name,
                    str(count),
                    f"{1e3 * step.value:,.1f} ({_ms(step)})",
                    predicted,
                    error,
                    f"{sample.facts.compile_sec:.1f}",
                ]
            )
        return rows

    def to_json(self) -> dict[str, Any]:
        """Returns all measurements, the fit and the held-out prediction."""
        held_out = ScalingModel.hold_out(self.counts, self.medians, pairwise=self.pairwise)
        return {
            "name": self.name,
            "counts": self.counts,
            "step_secs": [sample.step_secs for sample in self.samples],
            "compile_secs": [sample.facts.compile_sec for sample in self.samples],
            "fit": dataclasses.asdict(self.model),
            "held_out": dataclasses.asdict(held_out) | {"error": held_out.error},
            "predicted_interval": [self.predicted.low, self.predicted.high],
        }


def _ms(sec: interval.Interval) -> str:
    return f"{1e3 * sec.low:,.1f}–{1e3 * sec.high:,.1f}"


def run(kinds: dict[str, list[Case]], rounds: int) -> list[Study]:
    """Measures all cases in the same rounds."""
    with StepProgress(1) as progress:
        cases = [case for own in kinds.values() for case in own]
        measured = measure(cases, repeats=rounds, progress=progress, block_sec=BLOCK_SEC)
    samples = iter(measured.samples)
    return [
        Study(name, [case.num_devices or 1 for case in own], [next(samples) for _ in own])
        for name, own in kinds.items()
    ]


def parse_counts(text: str) -> list[int]:
    """Returns ascending numbers of devices, at least three, or none.

    Raises:
        argparse.ArgumentTypeError: there are too few, or they are not numbers of devices.
    """
    try:
        counts = sorted({int(part) for part in text.split(",") if part})
    except ValueError:
        counts = [0]
    if counts and (len(counts) < MIN_COUNTS or counts[0] < 1):
        raise argparse.ArgumentTypeError(
            f"at least {MIN_COUNTS} different numbers above 0 are required, got {text!r}"
        )
    return counts


def main() -> None:
    """Measures, prints one table and the fits, and writes a JSON file."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--devices", type=parse_counts, default=[2, 4, 8, 16])
    parser.add_argument("--workers", type=parse_counts, default=[1, 2, 4, 6, 8])
    parser.add_argument("--model", choices=MODEL_NAMES, default="lenet")
    parser.add_argument("--shard", type=int, default=32)
    parser.add_argument("--json", default="runs/scaling_study.json")
    options = parser.parse_args()
    studies = []
    for cases_of, counts in ((device_cases, options.devices), (worker_cases, options.workers)):
        if counts:
            studies += run(cases_of(options.model, options.shard, counts), options.rounds)
    console.print_table(
        f"{options.model}, {options.shard} images on each device, {options.rounds} rounds; devices"
        f" on the same {num_cores()} cores, workers on the same core",
        ["kind", "devices", "ms a step", "predicted", "error", "s until compiled"],
        [row for study in studies for row in study.rows()],
    )
    for study in studies:
        print(f"{study.name}: {study.model}")
    path = pathlib.Path(options.json)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, {"options": vars(options), "studies": [study.to_json() for study in studies]})
    print(f"Saved {path}")


if __name__ == "__main__":
    main()
