"""Finds the factors of the replicas' gradients for steps without a recorded loss."""

import numpy as np

from .context import StepContext
from .distances import (
    NOTHING_BUT_ROUNDING,
    dense,
    factor_of,
    is_finite,
    norm,
    scaled_by,
    two_factors_of,
)
from .expected_gradients import regular_gradients


def factors_that_fit(context: StepContext) -> list[float]:
    """Returns the replicas' factors; if none fits, the median of those that do."""
    factors, fits = factors_sent(context), []
    for r, factor in enumerate(factors):
        actual, expected = (
            context.per_replica("raw")[r],
            [scaled_by(g, factor) for g in context.own[r].raw],
        )
        context.scales[r] = factor, factor
        if len(actual) == len(expected) and any(context.near(r, actual, expected, factor)):
            fits.append(r)
    usual = float(np.median([factors[r] for r in fits])) if fits else 1 / len(factors)
    return [factor if r in fits else usual for r, factor in enumerate(factors)]


def factors_sent(context: StepContext) -> list[float]:
    """Returns the factor of each replica's gradients relative to those of its examples.

    Without a recorded loss there is no other information; the sum over the replicas shows whether
    the factor is right. The median over the tensors, because some may be wrong.
    """
    found = []
    for raw, own in zip(context.per_replica("raw"), context.own, strict=True):
        weights = np.array([norm(g) for g in own.raw])
        factors = np.array([factor_of([a], [e]) for a, e in zip(raw, own.raw, strict=False)])
        usable = np.isfinite(factors) & (weights > NOTHING_BUT_ROUNDING * weights.mean())
        usual = float(np.median(factors[usable])) if usable.any() else 0.0
        found.append(usual or 1 / len(context.replicas))
    return found


def two_factors(context: StepContext, r: int, factor: float) -> tuple[float, float]:
    """Returns the factors of a replica's data loss and of its regularisation.

    They are equal unless two factors explain more tensors: a step may divide the data loss by the
    global batch, and the regularisation by the number of replicas.
    """
    actual, own = context.per_replica("raw")[r], context.own[r].raw
    regular = regular_gradients(context, context.per_replica("before")[r], context.data[r])
    if not regular or not len(actual) == len(own) == len(regular):
        return factor, factor
    if not is_finite(actual) or not is_finite(own):
        return factor, factor
    rest = [dense(o) - part for o, part in zip(own, regular, strict=True)]
    arrays = [
        [dense(array).ravel() for array in three]
        for three in zip(actual, rest, regular, strict=True)
    ]
    fits = [two_factors_of(*three) for three in arrays]
    if not any(fits):
        return factor, factor
    usual = np.median([fit[0] for fit in fits if fit])
    # Wrong tensors do not affect the factors of the others.
    chosen = [
        three for three, fit in zip(arrays, fits, strict=True)
        if fit and abs(fit[0] - usual) <= 1e-3 * abs(usual)
    ]  # fmt: skip
    joined = [np.concatenate(parts) for parts in zip(*chosen, strict=True)]
    if not joined or not (fit := two_factors_of(*joined)) or not np.isfinite(fit[1]):
        return factor, factor

    def num_near(a: float, b: float) -> int:
        expected = [a * data + b * part for data, part in zip(rest, regular, strict=True)]
        return sum(context.near(r, actual, expected, max(abs(a), abs(b))))

    return fit if num_near(*fit) > num_near(factor, factor) else (factor, factor)
