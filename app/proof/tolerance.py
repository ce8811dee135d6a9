"""How far rounding alone can carry a result: computed from other orders of summation."""

import collections
import dataclasses
import math
from collections.abc import Sequence

import numpy as np

from app.proof.measurement import SMALLEST, UNIT_ROUNDOFF, Measurement


@dataclasses.dataclass(frozen=True)
class Sample:
    """A measurement whose tolerance follows from how far other orders of summation come out.

    Attributes:
        measurement: without its tolerance.
        spread: for each order, the largest difference of the float32 from the float64 reference.
    """

    measurement: Measurement
    spread: Sequence[float]


def with_tolerances(samples: Sequence[Sample]) -> list[Measurement]:
    """Returns the measurements with their tolerances.

    For one array the orders come out at distances d₁ … dₖ from the exact result. How far one order
    can be from the others is seen in many arrays together, those of the forward pass and those of
    the backward pass: q is the largest ratio of any d to the geometric mean of the rest. The
    tolerance is the geometric mean of the d's, times q².

    Squared because the largest of N ratios is easily exceeded by one more, whereas its square is
    exceeded once in N² even where large ratios are as frequent as they are when a ReLU flips.
    """
    logs = [_logs(sample) for sample in samples]
    margins: dict[str, float] = collections.defaultdict(float)
    for sample, values in zip(samples, logs, strict=True):
        rest = (np.sum(values) - values) / (len(values) - 1)
        direction = _direction(sample)
        margins[direction] = max(margins[direction], float(np.max(values - rest)))
    return [
        dataclasses.replace(
            sample.measurement,
            tolerance=math.exp(np.mean(values) + 2 * margins[_direction(sample)]),
        )
        for sample, values in zip(samples, logs, strict=True)
    ]


def _direction(sample: Sample) -> str:
    return "backward" if sample.measurement.kind == "gradients" else "forward"


def _logs(sample: Sample) -> np.ndarray:
    """Returns the logarithms of the distances, none of them below half a unit in the last place."""
    measured = sample.measurement
    magnitude = measured.absolute / measured.relative if measured.relative else 0.0
    return np.log(np.maximum(sample.spread, UNIT_ROUNDOFF * magnitude + SMALLEST))
