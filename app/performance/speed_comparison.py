"""Compares measured cases: more devices, other strategies, other precisions."""

import dataclasses
from collections.abc import Iterator, Sequence

from app.performance import interval
from app.performance.case import Sample
from app.performance.comparability import Caveat, find_caveats
from app.performance.interval import Interval


@dataclasses.dataclass(frozen=True)
class Comparison:
    """The speed of one case relative to another.

    Attributes:
        axis: one of `comparability.AXES`.
        case: name of the case.
        base: name of the case that it is compared with.
        ideal: the ideal ratio; for scaling, the ratio of the numbers of devices.
        speed_up: ratio of images per second; None if the cases are not comparable.
        caveats: caveats of the comparison.
    """

    axis: str
    case: str
    base: str
    ideal: float | None
    speed_up: Interval | None
    caveats: list[Caveat]

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
    found = find_caveats(base, sample, axis)
    refused = any(caveat.refuses for caveat in found)
    speed_up = None if refused else interval.ratio(sample.rates, base.rates)
    return Comparison(axis, sample.case.name, base.case.name, ideal, speed_up, found)


def all_comparisons(samples: Sequence[Sample]) -> list[Comparison]:
    """Returns every comparison that the cases allow, scaling first."""
    return [
        *_scaling(samples, "strong scaling"),
        *_scaling(samples, "weak scaling"),
        *_other_strategies(samples),
        *_other_precisions(samples),
    ]


def _scaling(samples: Sequence[Sample], axis: str) -> Iterator[Comparison]:
    """Compares more devices with the fewest, with a fixed global batch or a fixed batch per device.

    `single`, if measured, represents one device of any strategy.
    """
    for s in samples:
        bases = [
            base
            for base in samples
            if _key(base, axis) == _key(s, axis)
            and base.facts.num_devices < s.facts.num_devices
            and base.case.config.strategy in ("single", s.case.config.strategy)
        ]
        if bases:
            base = min(
                bases,
                key=lambda b: (b.facts.num_devices, b.case.config.strategy != "single"),
            )
            ideal = s.facts.num_devices / base.facts.num_devices
            if s.facts.simulated_devices:
                # The cores of a single device are split among several.
                ideal = 1.0
            yield compare(axis, s, base, ideal)


def _key(s: Sample, axis: str) -> tuple:
    config, facts = s.case.config, s.facts
    weak = axis == "weak scaling"
    batch = facts.global_batch_size / facts.num_devices if weak else facts.global_batch_size
    return config.model, config.precision, batch


def _other_strategies(samples: Sequence[Sample]) -> Iterator[Comparison]:
    """Compares each strategy with the first one on as many devices."""
    first: dict[tuple, Sample] = {}
    for s in samples:
        key = (*_key(s, "strategy"), s.facts.num_devices)
        if key in first:
            yield compare("strategy", s, first[key])
        first.setdefault(key, s)


def _other_precisions(samples: Sequence[Sample]) -> Iterator[Comparison]:
    """Compares each precision with the first one, all else being equal."""
    first: dict[tuple, Sample] = {}
    for s in samples:
        config = s.case.config
        key = config.strategy, s.facts.num_devices, config.model, s.facts.global_batch_size
        if key in first:
            yield compare("precision", s, first[key])
        first.setdefault(key, s)
