"""Computes the effect of rounding on a result from other orders of summation."""

import collections
import dataclasses
from collections.abc import Sequence

from app.verification.measurement import UNIT_ROUNDOFF, Measurement

# Another order may have a larger error than all tested ones.
_MARGIN = 4
# An array with such an error in any order is only rounding error, such as the gradient of a bias
# that BatchNorm removes; it is not conclusive for other arrays.
_NOTHING_BUT_ROUNDING = 0.1
LARGEST_LIMIT = _MARGIN * _NOTHING_BUT_ROUNDING  # For an array that is more than rounding error.


@dataclasses.dataclass(frozen=True)
class SummationSample:
    """A measurement whose limit is computed from the spread over orders of summation.

    Attributes:
        measurement: measurement without its limit.
        spread: for each order, the relative error of the float32 reference from the float64
            reference.
    """

    measurement: Measurement
    spread: Sequence[float]


def with_limits(samples: Sequence[SummationSample]) -> list[Measurement]:
    """Returns the measurements with their limits.

    Rounding usually costs a few ULPs, but it can flip a ReLU, or many of them if BatchNorm centres
    a large uniform area on 0. Which arrays of a pass are affected is random. The limit is therefore
    the same for all arrays of the forward pass, and for all of the backward pass: four times the
    largest error of any order of summation in any array and step. Errors are measured in the
    Euclidean norm, where a few flipped elements do not dominate. For ResNet-18, float32 is then
    accurate to a few percent; for LeNet, to a few ten-thousandths at worst.
    """
    largest: dict[str, float] = collections.defaultdict(lambda: float(UNIT_ROUNDOFF))
    for sample in samples:
        error = max(sample.spread)
        if error < _NOTHING_BUT_ROUNDING:
            direction = _direction(sample)
            largest[direction] = max(largest[direction], error)
    return [
        dataclasses.replace(
            sample.measurement,
            limit=float(_MARGIN * max(*sample.spread, largest[_direction(sample)])),
        )
        for sample in samples
    ]


def _direction(sample: SummationSample) -> str:
    return "backward" if sample.measurement.kind == "gradients" else "forward"
