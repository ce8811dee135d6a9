"""Measures the effect of rounding on a step from its repetitions."""

import dataclasses
from collections.abc import Sequence

import numpy as np

from .distances import (
    NOTHING_BUT_ROUNDING,
    distance,
    norm,
    ratio_of,
    relative_distance,
    relative_norm,
)
from .reference_model import StepResult


@dataclasses.dataclass
class Spread:
    """The effect of rounding on the forward and the backward pass of a shard.

    Attributes:
        forward: relative distance of predictions and loss.
        backward: relative distance of all gradients.
        gradients: absolute distance of each gradient.
    """

    forward: float
    backward: float
    gradients: list[float]


def spread_of(own: StepResult, repeated: Sequence[StepResult], unit: float) -> Spread:
    """Returns the largest distances of repetitions from a step.

    Args:
        own: the step.
        repeated: the same step with other rounding.
        unit: the smallest relative distance to return.
    """
    forward = backward = unit
    gradients = [0.0] * len(own.raw)
    size = np.sqrt(sum(norm(g) ** 2 for g in own.raw))
    for result in repeated:
        for a, b in zip(result.y_pred, own.y_pred, strict=True):
            forward = max(forward, ratio_of(distance(a, b), norm(b)))
        if len(result.raw) != len(own.raw):  # From a step that overflowed.
            continue
        apart = [distance(a, b) for a, b in zip(result.raw, own.raw, strict=True)]
        gradients = [max(a, b) for a, b in zip(gradients, apart, strict=True)]
        backward = max(backward, ratio_of(np.sqrt(sum(a**2 for a in apart)), size))
    for far, gradient in zip(gradients, own.raw, strict=True):
        if (ratio := ratio_of(far, norm(gradient))) < NOTHING_BUT_ROUNDING:
            backward = max(backward, ratio)
    return Spread(forward, backward, gradients)


def is_another_step(
    result: StepResult, own: StepResult, near: Sequence[StepResult], unit: float
) -> bool:
    """Returns whether a step depends on the order of its examples by more than rounding.

    Args:
        result: the step with the examples in another order.
        own: the step.
        near: the step with weights changed by one ULP.
        unit: the smallest relative distance that counts.
    """

    def apart(other: StepResult) -> tuple[float, float]:
        if len(other.raw) != len(own.raw):  # From a step that overflowed.
            return relative_distance(other.y_pred, own.y_pred), 0.0
        return relative_distance(other.y_pred, own.y_pred), relative_norm(other.raw, own.raw)

    usual = np.max([apart(other) for other in near], axis=0)
    return bool(np.any(np.array(apart(result)) > 100 * np.maximum(usual, unit)))
