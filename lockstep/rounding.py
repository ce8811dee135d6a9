"""Measures how far rounding reaches: repeats a step with other rounding."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from lockstep.arithmetic import (
    EPS,
    MARGIN,
    NOTHING_BUT_ROUNDING,
    distance,
    norm,
    ratio,
    relative_distance,
    relative_norm,
    total_norm,
)
from lockstep.oracles import Ask, Computed, Oracle
from lockstep.trace import Named


class Spread(NamedTuple):
    """The effect of rounding on the forward and the backward pass of a shard.

    Attributes:
        forward: relative distance of predictions and loss.
        backward: relative distance of all gradients.
        gradients: absolute distance of each gradient.
    """

    forward: float
    backward: float
    gradients: dict[str, float]


def measure(
    oracle: Oracle, ask: Ask, rounded: Sequence[str], *, seed: int, exactly: bool
) -> tuple[Computed, Spread, bool]:
    """Computes a step in float64 if possible, and the effect of float32 rounding.

    Args:
        oracle: computes the step.
        ask: the step.
        rounded: names of the variables to change by one unit in the last place.
        seed: seed of the changes.
        exactly: whether to try float64.

    Returns:
        The step, the effect of rounding, and whether the step was computed in float64.
    """
    own = oracle.compute(ask)
    spread = repeated_spread(oracle, own, ask, rounded, seed)
    if not (exactly and oracle.is_exact):
        return own, spread, False
    exact = oracle.compute(ask, exactly=True)
    forward = relative_distance(own.y_pred, exact.y_pred)
    backward = relative_norm(own.raw, exact.raw)
    if forward > MARGIN * spread.forward or backward > MARGIN * spread.backward:
        return own, spread, False  # The code depends on dtypes.
    gradients = {
        name: max(distance(own.raw[name], exact.raw[name]), apart)
        for name, apart in spread.gradients.items()
    }
    widest = max(forward, spread.forward), max(backward, spread.backward)
    return exact._replace(after=own.after), Spread(*widest, gradients), True


def repeated_spread(
    oracle: Oracle, own: Computed, ask: Ask, rounded: Sequence[str], seed: int
) -> Spread:
    """Repeats a step in another order, and with variables changed by one unit."""
    generator, unit = np.random.default_rng(seed), oracle.unit
    repeated = []
    for _ in range(2):
        near = {
            name: array * (1 + unit * generator.choice([-1, 1], array.shape)).astype(array.dtype)
            for name, array in ask.state.items()
            if name in rounded
        }
        repeated.append(oracle.compute(ask._replace(state=ask.state | near)))
    num = len(ask.data[0])
    aligned = all(len(p) == num for p in own.y_pred if p.ndim)
    if not oracle.random_layers and aligned and num > 1:
        order = generator.permutation(num)
        starts = None if ask.starts is None else [start[order] for start in ask.starts]
        moved = ask._replace(data=[array[order] for array in ask.data], starts=starts)
        result = oracle.compute(moved)
        back = np.argsort(order)
        result = result._replace(y_pred=[p[back] if p.ndim else p for p in result.y_pred])
        if not is_another_step(result, own, repeated, unit):
            repeated.append(result)
    # A bfloat16 sum may saturate at the same number in all of these repetitions.
    fine = oracle.compute_finely(ask) if unit > EPS else None
    if fine and not is_another_step(fine, own, repeated, unit):
        repeated.append(fine)
    return spread_of(own, repeated, unit)


def spread_of(own: Computed, repeated: Sequence[Computed], unit: float) -> Spread:
    """Returns the largest distances of repetitions from a step.

    Args:
        own: the step.
        repeated: the same step with other rounding.
        unit: the smallest relative distance to return.
    """
    forward = backward = unit
    gradients = dict.fromkeys(own.raw, 0.0)
    size = total_norm(own.raw)
    for result in repeated:
        forward = max(forward, relative_distance(result.y_pred, own.y_pred))
        if result.raw.keys() != own.raw.keys():  # From a step that overflowed.
            continue
        apart = {name: distance(result.raw[name], g) for name, g in own.raw.items()}
        gradients = {name: max(apart[name], far) for name, far in gradients.items()}
        backward = max(backward, ratio(float(np.sqrt(sum(a**2 for a in apart.values()))), size))
    for name, far in gradients.items():
        if (relative := ratio(far, norm(own.raw[name]))) < NOTHING_BUT_ROUNDING:
            backward = max(backward, relative)
    return Spread(forward, backward, gradients)


def is_another_step(result: Computed, own: Computed, near: Sequence[Computed], unit: float) -> bool:
    """Returns whether a step depends on the order of its examples by more than rounding.

    Args:
        result: the step with the examples in another order.
        own: the step.
        near: the step with variables changed by one unit.
        unit: the smallest relative distance that counts.
    """

    def apart(other: Computed) -> tuple[float, float]:
        gradients = relative_norm(other.raw, own.raw) if _same_names(other.raw, own.raw) else 0.0
        return relative_distance(other.y_pred, own.y_pred), gradients

    usual = np.max([apart(other) for other in near], axis=0)
    return bool(np.any(np.array(apart(result)) > 100 * np.maximum(usual, unit)))


def _same_names(first: Named, second: Named) -> bool:
    return first.keys() == second.keys()
