"""Finds the scales of the shards' gradients in traces without a loss."""

import numpy as np

from lockstep.arithmetic import (
    NOTHING_BUT_ROUNDING,
    are_finite,
    dense,
    factor_of,
    norm,
    scaled_all,
)
from lockstep.context import Context

Scales = tuple[tuple[float, float], ...]


def scales_that_fit(context: Context) -> Scales:
    """Returns the factors of each shard's data loss and regularisation.

    Without a recorded loss there is no other information; the sum over the shards shows whether
    the factor is right. A shard whose factor fits nothing gets the median of those that do.
    """
    factors, raw = _factors_sent(context), context.named("raw")
    fits = []
    for shard, factor in enumerate(factors):
        expected = scaled_all(context.expected(shard).step.raw, factor)
        same_names = raw[shard].keys() == expected.keys()
        if same_names and context.near(shard, raw[shard], expected, factor):
            fits.append(shard)
    usual_factor = float(np.median([factors[s] for s in fits])) if fits else 1 / len(factors)
    return tuple(
        _two_factors(context, shard, factor if shard in fits else usual_factor)
        for shard, factor in enumerate(factors)
    )


def _factors_sent(context: Context) -> list[float]:
    """Returns the factor of each shard's gradients relative to those of its examples.

    It is the median over the tensors, because some may be wrong.
    """
    found = []
    for shard, raw in enumerate(context.named("raw")):
        own = context.expected(shard).step.raw
        names = [name for name in own if name in raw]
        weights = np.array([norm(own[name]) for name in names])
        factors = np.array([factor_of([raw[name]], [own[name]]) for name in names])
        usable = np.isfinite(factors) & (weights > NOTHING_BUT_ROUNDING * weights.mean())
        usual = float(np.median(factors[usable])) if usable.any() else 0.0
        found.append(usual or 1 / len(context.shards))
    return found


def _two_factors(context: Context, shard: int, factor: float) -> tuple[float, float]:
    """Returns the factors of a shard's data loss and of its regularisation.

    They are equal unless two factors explain more tensors: a step may divide the data loss by the
    global batch, and the regularisation by the number of replicas.
    """
    actual, own = context.named("raw")[shard], context.expected(shard).step.raw
    regular = context.oracle.regular_gradients(context.state(shard), context.data[shard])
    if not regular or actual.keys() != own.keys():
        return factor, factor
    if not are_finite(actual) or not are_finite(own):
        return factor, factor
    rest = {name: dense(own[name]) - dense(regular[name]) for name in own}
    triples = [
        [dense(each[name]).ravel() for each in (actual, rest, regular)] for name in own
    ]  # fmt: skip
    fits = [_fit(*triple) for triple in triples]
    if not any(fits):
        return factor, factor
    usual = np.median([fit[0] for fit in fits if fit])
    # Wrong tensors do not affect the factors of the others.
    chosen = [
        triple
        for triple, fit in zip(triples, fits, strict=True)
        if fit and abs(fit[0] - usual) <= 1e-3 * abs(usual)
    ]
    joined = [np.concatenate(parts) for parts in zip(*chosen, strict=True)]
    if not joined or not (fit := _fit(*joined)) or not np.isfinite(fit[1]):
        return factor, factor

    def num_near(a: float, b: float) -> int:
        expected = {name: a * rest[name] + b * dense(regular[name]) for name in own}
        return len(context.near(shard, actual, expected, max(abs(a), abs(b))))

    return fit if num_near(*fit) > num_near(factor, factor) else (factor, factor)


def _fit(actual: np.ndarray, first: np.ndarray, second: np.ndarray) -> tuple[float, float] | None:
    """Returns (a, b) with `a * first + b * second` closest to `actual`.

    b is NaN if `second` is 0 everywhere; returns None if both vectors are nearly parallel.
    """
    sizes = norm(first), norm(second)
    if not sizes[1]:
        return (factor_of([actual], [first]), np.nan) if sizes[0] else None
    if not sizes[0] or abs(np.vdot(first, second)) > 0.99 * sizes[0] * sizes[1]:
        return None
    columns = np.stack([first / sizes[0], second / sizes[1]], axis=1)
    (a, b), *_ = np.linalg.lstsq(columns, actual, rcond=None)
    return float(a / sizes[0]), float(b / sizes[1])
