"""How far rounding alone can carry a result: computed from other orders of summation."""

import collections
import dataclasses
from collections.abc import Sequence

from app.verification.measurement import UNIT_ROUNDOFF, Measurement

# One order more than those that were tried may come out further than all of them.
_MARGIN = 4
# An array this far off in any order is nothing but rounding, such as the gradient of a bias that
# BatchNorm takes away again: it says nothing about others.
_NOTHING_BUT_ROUNDING = 0.1
LARGEST_LIMIT = _MARGIN * _NOTHING_BUT_ROUNDING  # Of an array that is more than rounding.


@dataclasses.dataclass(frozen=True)
class SummationSample:
    """A measurement whose limit follows from how far other orders of summation come out.

    Attributes:
        measurement: without its limit.
        spread: for each order, the relative error of the float32 from the float64 reference.
    """

    measurement: Measurement
    spread: Sequence[float]


def with_limits(samples: Sequence[SummationSample]) -> list[Measurement]:
    """Returns the measurements with what their error may be.

    Rounding mostly costs a few units in the last place, but now and then it tips a ReLU over, or
    many of them, where BatchNorm centres a large even area on 0. Which arrays of a pass that hits
    is chance. So the limit is the same for all arrays of the forward pass, and for all of the
    backward pass: four times the largest error that any order of summation had in any of them, in
    any step. Errors are taken in the Euclidean norm, in which a few elements that were tipped over
    do not outweigh all others. For ResNet-18 float32 is then good for a few percent; for LeNet, for
    a few ten-thousandths at worst.
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
