"""Compares measured cases: more devices, other strategies, other precisions."""

import dataclasses
from collections.abc import Iterator, Sequence

from app.performance import interval
from app.performance.case import Sample
from app.performance.interval import Interval

AXIS_TITLES = {
    "strong scaling": "strong scaling: the same global batch, cut into more shards",
    "weak scaling": "weak scaling: the same batch for each device",
    "strategy": "strategies: the same training on as many devices",
    "precision": "precisions: the same training, computed in other types",
}


@dataclasses.dataclass(frozen=True)
class Comparison:
    """The speed of one case relative to another.

    Attributes:
        axis: what differs, a key of `AXIS_TITLES`.
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
        compare(axis, s, base, _ideal(s, base) if axis.endswith("scaling") else None)
        for axis in AXIS_TITLES
        for s in whole
        if (base := _base_of(s, whole, axis))
    ]


def _base_of(s: Sample, samples: Sequence[Sample], axis: str) -> Sample | None:
    """Returns the sample to compare with along an axis; None without one.

    For scaling it has the fewest devices, where `single` is one device of any strategy; else it is
    the first one that differs only in the strategy, or in the precision.
    """
    alike = [other for other in samples if _shared(other, axis) == _shared(s, axis)]
    if not axis.endswith("scaling"):
        return alike[0] if alike[0] is not s else None
    strategies = "single", s.case.config.distribution.strategy
    smaller = [
        other
        for other in alike
        if other.facts.num_devices < s.facts.num_devices
        and other.case.config.distribution.strategy in strategies
    ]

    def order(other: Sample) -> tuple[int, bool]:
        return other.facts.num_devices, other.case.config.distribution.strategy != "single"

    return min(smaller, key=order, default=None)


def _shared(s: Sample, axis: str) -> tuple:
    """Returns what two cases have in common that are compared along an axis."""
    training, num_devices = s.case.config.training, s.facts.num_devices
    size, strategy = s.facts.global_batch_size, s.case.config.distribution.strategy
    return {
        "strong scaling": (training.model, training.precision, size),
        "weak scaling": (training.model, training.precision, size / num_devices),
        "strategy": (training.model, training.precision, size, num_devices),
        "precision": (training.model, strategy, size, num_devices),
    }[axis]


def _ideal(s: Sample, base: Sample) -> float:
    """Returns the ideal speed-up; simulated devices share the cores that a single one has alone."""
    return 1.0 if s.facts.simulated_devices else s.facts.num_devices / base.facts.num_devices


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
