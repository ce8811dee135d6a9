"""Compares the arrays of a trace, in float64."""

from collections.abc import Mapping, Sequence

import numpy as np

EPS = float(np.finfo(np.float32).eps)
TINY = float(np.finfo(np.float32).tiny)
_BFLOAT16_EPS = 2.0**-7
# Arrays with a norm below this fraction of the largest are measured relative to the largest norm:
# the gradient may be rounding error, as that of a bias before BatchNorm.
_SMALL_PART = 1e-2


def norm(array: np.ndarray) -> float:
    """Returns the Euclidean norm."""
    return float(np.linalg.norm(array.astype(np.float64).ravel()))


def total_norm(arrays: Sequence[np.ndarray]) -> float:
    """Returns the norm of all arrays concatenated."""
    return float(np.sqrt(sum(norm(array) ** 2 for array in arrays)))


def relative_distances(actual: Sequence[np.ndarray], expected: Sequence[np.ndarray]) -> list[float]:
    """Returns for each array its distance from the expected one, relative to its norm."""
    sizes = [norm(array) for array in expected]
    least = _SMALL_PART * max(sizes, default=0.0)
    return [
        distance(a, e, max(size, least, TINY))
        for a, e, size in zip(actual, expected, sizes, strict=True)
    ]


def distances_of(
    actual: Mapping[str, np.ndarray], expected: Mapping[str, np.ndarray]
) -> dict[str, float]:
    """Returns name → relative distance, for the names of the actual arrays."""
    values = relative_distances(list(actual.values()), [expected[name] for name in actual])
    return dict(zip(actual, values, strict=True))


def distance(actual: np.ndarray, expected: np.ndarray, size: float) -> float:
    """Returns the norm of the difference over `size`; infinite for NaN and different shapes."""
    if actual.shape != expected.shape:
        return float("inf")
    apart = norm(actual.astype(np.float64) - expected.astype(np.float64))
    return apart / size if np.isfinite(apart) else float("inf")


def same_bits(first: np.ndarray, second: np.ndarray) -> bool:
    """Returns whether two arrays are bitwise identical."""
    return first.shape == second.shape and first.tobytes() == second.tobytes()


def unit_of(array: np.ndarray) -> float:
    """Returns the relative rounding error of an array's dtype, or of bfloat16 stored as float32."""
    if array.dtype == np.float32 and array.size:
        bits = np.ascontiguousarray(array).view(np.uint32)
        return _BFLOAT16_EPS if not np.any(bits & 0xFFFF) and np.any(bits) else EPS
    return float(np.finfo(array.dtype).eps) if array.dtype.kind == "f" else 0.0


def factor(actual: Sequence[np.ndarray], expected: Sequence[np.ndarray]) -> float:
    """Returns the c for which c · expected is closest to actual, over all arrays."""
    pairs = [
        (a.astype(np.float64).ravel(), e.astype(np.float64).ravel())
        for a, e in zip(actual, expected, strict=True)
    ]
    size = sum(float(e @ e) for _, e in pairs)
    return sum(float(a @ e) for a, e in pairs) / size if size else float("nan")


def all_finite(arrays: Sequence[np.ndarray]) -> bool:
    """Returns whether no array contains NaN or infinity."""
    return all(bool(np.isfinite(array).all()) for array in arrays if array.dtype.kind == "f")
