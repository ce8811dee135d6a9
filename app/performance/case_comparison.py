"""Compares measured cases: more devices, other strategies, other precisions."""

import dataclasses
from collections.abc import Iterator, Sequence

from app.performance import interval
from app.performance.case import Sample
from app.performance.interval import Interval


@dataclasses.dataclass(frozen=True)
class Comparison:
    """The speed of one case relative to another.

    Attributes:
        axis: what differs: "strong scaling" (number of devices with a fixed global batch), "weak
            scaling" (with a fixed batch per device), "strategy" or "precision".
        case: name of the case.
        base: name of the case that it is compared with.
        ideal: the ideal ratio; for scaling, the ratio of the numbers of devices.
        speed_up: ratio of images per second; None if the comparison is refused.
        caveats: why it is refused, else what to keep in mind.
    """

    axis: str
    case: str
    base: str
    ideal: float | None
    speed_up: Interval | None
    caveats: list[str]

    @property
    def verdict(self) -> str:
        """The conclusion in words."""
        if self.speed_up is None:
            return "refused"
        if self.speed_up.contains(1.0):
            return "no difference found"
        return "faster" if self.speed_up.value > 1 else "slower"


def compare(axis: str, sample: Sample, base: Sample, ideal: float | None = None) -> Comparison:
    """Compares two cases along an axis, unless they are not comparable."""
    refusals = [f"refused: {text}" for text in _refusals(base, sample)]
    speed_up = None if refusals else interval.ratio(sample.rates, base.rates)
    caveats = refusals or list(_marks(base, sample, axis))
    return Comparison(axis, sample.case.name, base.case.name, ideal, speed_up, caveats)


def all_comparisons(samples: Sequence[Sample]) -> list[Comparison]:
    """Returns every comparison that the cases allow, scaling first."""
    whole = [s for s in samples if s.case.is_whole]
    return [
        *_scaling(whole, "strong scaling"),
        *_scaling(whole, "weak scaling"),
        *_with_first(whole, "strategy"),
        *_with_first(whole, "precision"),
    ]


def _scaling(samples: Sequence[Sample], axis: str) -> Iterator[Comparison]:
    """Compares more devices with the fewest; `single` is one device of any strategy."""

    def strategy_of(s: Sample) -> str:
        return s.case.config.distribution.strategy

    def key(s: Sample) -> tuple:
        batch = s.facts.global_batch_size
        batch_key = batch / s.facts.num_devices if axis == "weak scaling" else batch
        return s.case.config.training.model, s.case.config.training.precision, batch_key

    def order(s: Sample) -> tuple[int, bool]:
        return s.facts.num_devices, strategy_of(s) != "single"

    for s in samples:
        bases = [
            base
            for base in samples
            if key(base) == key(s)
            and base.facts.num_devices < s.facts.num_devices
            and strategy_of(base) in ("single", strategy_of(s))
        ]
        if bases:
            base = min(bases, key=order)
            # Simulated devices share the cores that a single one has alone.
            ratio = s.facts.num_devices / base.facts.num_devices
            yield compare(axis, s, base, 1.0 if s.facts.simulated_devices else ratio)


def _with_first(samples: Sequence[Sample], axis: str) -> Iterator[Comparison]:
    """Compares each strategy, or precision, with the first one, all else being equal."""
    first: dict[tuple, Sample] = {}
    for s in samples:
        config = s.case.config
        other = config.training.precision if axis == "strategy" else config.distribution.strategy
        key = other, config.training.model, s.facts.num_devices, s.facts.global_batch_size
        if key in first:
            yield compare(axis, s, first[key])
        first.setdefault(key, s)


def _refusals(first: Sample, second: Sample) -> Iterator[str]:
    if first.facts.jit_compile != second.facts.jit_compile:
        yield "XLA on one side only"
    if first.facts.dataset != second.facts.dataset:
        yield f"other images: {first.facts.dataset} and {second.facts.dataset}"
    for sample in (first, second):
        traced = sum(block.tracings for block in sample.blocks)
        if traced:
            yield f"{sample.case.name} was traced {traced} times while it was timed"


def _marks(first: Sample, second: Sample, axis: str) -> Iterator[str]:
    a, b = first.facts, second.facts
    if axis.endswith("scaling") and (a.simulated_devices or b.simulated_devices):
        yield (
            f"simulated devices: {max(a.num_devices, b.num_devices)} share {min(a.cores, b.cores)}"
            " cores, all of which one device would use; ideal is 1, and this is not scaling"
        )
    if axis == "strategy" and a.all_reduce != b.all_reduce and "none" not in (
        a.all_reduce, b.all_reduce,
    ):  # fmt: skip
        yield f"another all-reduce: {a.all_reduce} and {b.all_reduce}"
    if axis == "precision" and a.tensor_float_32:
        yield "float32 products are rounded to TF32"
