"""Computes a step on one device, and repeats it with different rounding."""

import dataclasses

import numpy as np

from .context import StepContext
from .distances import EPS, MARGIN, distance, relative_distance, relative_norm
from .recorder_imports import Arrays
from .reference_model import StepResult
from .spread import Spread, is_another_step, spread_of


def measure(
    context: StepContext, state: Arrays, data: Arrays, scales: tuple[float, float],
    starts: Arrays | None = None,
) -> tuple[StepResult, Spread]:  # fmt: skip
    """Returns a step on one device, in float64 if possible, and the effect of float32 rounding."""
    own = context.one.step(state, data, scales=scales, starts=starts)
    spread = repeated_spread(context, own, state, data, scales, starts)
    if context.exact is None:
        return own, spread
    exact = context.exact.step(state, data, scales=scales, starts=starts)
    if len(exact.raw) != len(own.raw):
        context.reference = context.one
        return own, spread
    forward = relative_distance(own.y_pred, exact.y_pred)
    backward = relative_norm(own.raw, exact.raw)
    if forward > MARGIN * spread.forward or backward > MARGIN * spread.backward:
        context.reference = context.one  # The code depends on dtypes.
        return own, spread
    context.num_in_float64 += 1
    apart = [distance(a, e) for a, e in zip(own.raw, exact.raw, strict=True)]
    gradients = [max(a, g) for a, g in zip(apart, spread.gradients, strict=True)]
    result = dataclasses.replace(exact, after=own.after)
    return result, Spread(max(forward, spread.forward), max(backward, spread.backward), gradients)


def repeated_spread(
    context: StepContext, own: StepResult, state: Arrays, data: Arrays, scales: tuple[float, float],
    starts: Arrays | None = None,
) -> Spread:  # fmt: skip
    """Repeats a step in another order, and with weights changed by one ULP."""
    one, generator = context.one, np.random.default_rng(context.position)
    repeated = []
    for _ in range(2):
        near = [
            array * (1 + one.unit * generator.choice([-1, 1], array.shape)).astype(array.dtype)
            if kind in ("weight", "statistic")
            else array
            for array, kind in zip(state, context.kinds, strict=True)
        ]
        repeated.append(one.step(near, data, scales=scales, starts=starts))
    num = len(data[0])
    aligned = all(len(p) == num for p in own.y_pred if p.ndim)
    if not one.random_layers and aligned and num > 1:
        order = generator.permutation(num)
        moved = None if starts is None else [start[order] for start in starts]
        result = one.step(state, [array[order] for array in data], scales=scales, starts=moved)
        back = np.argsort(order)
        result.y_pred = [p[back] for p in result.y_pred]
        if not is_another_step(result, own, repeated, one.unit):
            repeated.append(result)
    # A bfloat16 sum may saturate at the same number in all of these repetitions.
    fine = one.step_in_float32(state, data, scales, starts) if one.unit > EPS else None
    if fine and not is_another_step(fine, own, repeated, one.unit):
        repeated.append(fine)
    return spread_of(own, repeated, one.unit)
