"""Computes distances, sums, factors and bits of arrays and gradients."""

import collections
from collections.abc import Sequence
from typing import Any

import numpy as np

from .recorder_imports import Arrays, Sparse

EPS = float(np.finfo(np.float32).eps)
TINY = float(np.finfo(np.float32).tiny)
# A few repetitions underestimate the largest effect of rounding.
MARGIN = 8
NOTHING_BUT_ROUNDING = 0.1  # An array with a larger relative spread is rounding error only.


def dense(value: Any) -> np.ndarray:
    """Returns a gradient as one array, in float64."""
    if not isinstance(value, Sparse):
        return np.asarray(value, np.float64)
    out = np.zeros((int(value.rows), *value.values.shape[1:]))
    np.add.at(out, value.indices, value.values)
    return out


def add(values: Sequence[Any]) -> Any:
    """Adds gradients of replicas; sparse ones are joined, as `tf.distribute` does."""
    if isinstance(values[0], Sparse):
        rows = np.concatenate([value.values for value in values])
        return Sparse(rows, np.concatenate([v.indices for v in values]), values[0].rows)
    return np.add.reduce([np.asarray(value) for value in values])


def distance(actual: Any, expected: Any) -> float:
    """Returns ‖actual − expected‖; infinite for different shapes or positions of NaN and inf."""
    a, b = dense(actual), dense(expected)
    if a.shape != b.shape:
        return np.inf
    finite = np.isfinite(a) & np.isfinite(b)
    if np.any(np.isfinite(a) != np.isfinite(b)):
        return np.inf
    return float(np.linalg.norm((a - b)[finite]))


def norm(value: Any) -> float:
    """Returns the Euclidean norm of all finite elements."""
    array = dense(value)
    return float(np.linalg.norm(array[np.isfinite(array)]))


def is_finite(values: Arrays) -> bool:
    """Returns whether no element is NaN or infinite."""
    return all(bool(np.all(np.isfinite(dense(value)))) for value in values)


def scaled_by(value: Any, factor: float) -> Any:
    """Returns a gradient times a factor, in its dtype."""
    if isinstance(value, Sparse):
        return value._replace(values=(value.values * factor).astype(value.values.dtype))
    return (np.asarray(value) * factor).astype(np.asarray(value).dtype)


def factor_of(actual: Sequence[Any], expected: Sequence[Any]) -> float:
    """Returns the factor that brings `expected` nearest to `actual`, over all arrays."""
    dots = sum(float(np.vdot(dense(a), dense(e))) for a, e in zip(actual, expected, strict=True))
    squares = sum(norm(e) ** 2 for e in expected)
    return dots / squares if squares else np.nan


def two_factors_of(
    actual: np.ndarray, first: np.ndarray, second: np.ndarray
) -> tuple[float, float] | None:
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


def ratio_of(apart: float, size: float) -> float:
    """Returns a relative distance."""
    return 0.0 if apart == 0 else float(apart / max(size, TINY))


def relative_distance(actual: Arrays, expected: Arrays) -> float:
    """Returns the largest relative distance of two arrays."""
    return max(
        (ratio_of(distance(a, e), norm(e)) for a, e in zip(actual, expected, strict=True)),
        default=0.0,
    )


def relative_norm(actual: Arrays, expected: Arrays) -> float:
    """Returns the relative distance of all arrays together."""
    apart = sum(distance(a, e) ** 2 for a, e in zip(actual, expected, strict=True))
    return ratio_of(apart**0.5, total_norm(expected))


def total_norm(values: Arrays) -> float:
    """Returns the norm of all arrays together."""
    return float(np.sqrt(sum(norm(value) ** 2 for value in values)))


def is_far(actual: Any, expected: Any, allowed: float = 1e-5) -> bool:
    """Returns whether the relative distance is larger than allowed."""
    return distance(actual, expected) > allowed * norm(expected) + TINY


def is_within(actual: Any, expected: Any, bounds: np.ndarray) -> bool:
    """Returns whether each element is within its bound, or not finite in both."""
    a, e = dense(actual), dense(expected)
    if a.shape != e.shape:
        return False
    finite = np.isfinite(a) | np.isfinite(e)
    return bool(np.all((np.abs(a - e) <= bounds)[finite]))


def bytes_of(value: Any) -> bytes:
    """Returns the bits of an array."""
    parts = value[:2] if isinstance(value, Sparse) else [value]
    return b"".join(np.asarray(part).tobytes() for part in parts)


def same_bits(a: Any, b: Any) -> bool:
    """Returns whether two arrays are bitwise identical."""
    return bytes_of(a) == bytes_of(b)


def join_parts(parts: Sequence[np.ndarray]) -> np.ndarray:
    """Joins the arrays of all replicas; scalars are equal on all."""
    return np.concatenate(parts) if parts[0].ndim else parts[0]


def row_hashes(arrays: Arrays) -> collections.Counter:
    """Counts the rows of corresponding arrays."""
    rows = zip(*([np.asarray(row).tobytes() for row in array] for array in arrays), strict=True)
    return collections.Counter(hash(row) for row in rows)
