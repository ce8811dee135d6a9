"""Computes medians and ratios with bootstrap intervals, without assumptions about the noise."""

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np

_CONFIDENCE = 0.95
_RESAMPLES = 2000


@dataclasses.dataclass(frozen=True)
class Interval:
    """An estimate with its 95 % confidence interval.

    Attributes:
        value: a median, or a function of several.
        low: lower end.
        high: upper end.
    """

    value: float
    low: float
    high: float

    def contains(self, value: float) -> bool:
        """Returns whether the interval contains a value."""
        return self.low <= value <= self.high


def median(values: Sequence[float]) -> Interval:
    """Returns the median of `values`, one from each round."""
    return combine(lambda middle: middle, values)


def ratio(numerators: Sequence[float], denominators: Sequence[float]) -> Interval:
    """Returns the ratio of two medians; see `combine`."""
    return combine(lambda above, below: above / below, numerators, denominators)


def combine(function: Callable, *samples: Sequence[float]) -> Interval:
    """Returns a function of the medians of some samples.

    All samples were measured in the same rounds. The bootstrap therefore draws rounds, each with
    all its values: other work on the machine slows down all cases of a round.

    Args:
        function: takes one number per sample, or one array per sample and works elementwise.
        *samples: one value per round for each sample.

    Raises:
        ValueError: the samples have different numbers of rounds.
    """
    rounds = len(samples[0])
    if any(len(values) != rounds for values in samples):
        raise ValueError(f"rounds: {[len(values) for values in samples]}")
    drawn = np.random.default_rng(0).integers(rounds, size=(_RESAMPLES, rounds))
    resampled = function(*(np.median(np.asarray(values)[drawn], axis=1) for values in samples))
    low, high = np.quantile(resampled, [(1 - _CONFIDENCE) / 2, (1 + _CONFIDENCE) / 2])
    return Interval(float(function(*map(np.median, samples))), float(low), float(high))
