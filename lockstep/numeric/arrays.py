"""Computes distances, sums, factors and bits of arrays and gradients, in float64."""

import collections
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from lockstep.numeric.sampling import Sampled


class Rows(NamedTuple):
    """A gradient of some rows of a weight; rows that occur several times are to be added.

    Attributes:
        values: `(n, …)`, one entry per index.
        indices: `(n,)`, row numbers.
        rows: length of the weight's first axis.
    """

    values: np.ndarray
    indices: np.ndarray
    rows: int

    def dense(self) -> np.ndarray:
        """Returns the gradient of the whole weight."""
        whole = np.zeros((self.rows, *self.values.shape[1:]), self.values.dtype)
        np.add.at(whole, self.indices, self.values)
        return whole


Array = Any  # np.ndarray | Rows | Sampled
Named = dict[str, Array]  # Name of a variable → its array.


EPS = float(np.finfo(np.float32).eps)
TINY = float(np.finfo(np.float32).tiny)  # Smaller numbers may be flushed to 0.
MARGIN = 8  # A few repetitions underestimate the largest effect of rounding.
_BLOCK = 1 << 16  # Elements.
NOTHING_BUT_ROUNDING = 0.1  # An array with a larger relative spread is rounding error only.
# The gradient of a bias before BatchNorm is rounding error only: gradients smaller than this part
# of the largest are measured relative to the largest.
SMALL_PART = 1e-2
UNITS = {  # Largest step between numbers near 1.
    "bfloat16": 2.0**-7,
    "float16": 2.0**-10,
    "tensorfloat32": 2.0**-10,  # Of a GPU's products of float32.
}


def dense(value: Array) -> np.ndarray:
    """Returns an array, or a gradient of rows, as one array in float64; of a sample the vector."""
    if not isinstance(value, Rows):
        return np.asarray(value, np.float64)
    whole = np.zeros((value.rows, *value.values.shape[1:]))
    np.add.at(whole, value.indices, value.values)
    return whole


def add(values: Sequence[Array]) -> Array:
    """Adds gradients in order; those of rows are joined, as `tf.distribute` does."""
    if all(isinstance(value, Rows) for value in values):
        rows = np.concatenate([value.values for value in values])
        return Rows(rows, np.concatenate([v.indices for v in values]), values[0].rows)
    if all(isinstance(value, Sampled) for value in values):
        return functools.reduce(Sampled.plus, values)
    with np.errstate(invalid="ignore"):  # Of gradients that overflow.
        return np.add.reduce([plain(value) for value in values])


def plain(value: Array) -> np.ndarray:
    """Returns an array, or a gradient of rows as an array, in its dtype."""
    return value.dense() if isinstance(value, Rows) else np.asarray(value)


def elements_of(value: Array) -> np.ndarray:
    """Returns the elements of an array that are known, in its dtype: of a sample without sums."""
    return value.elements if isinstance(value, Sampled) else plain(value)


def add_named(parts: Sequence[Named]) -> Named:
    """Adds gradients by name, for the names that all parts have."""
    return {n: add([p[n] for p in parts]) for n in parts[0] if all(n in p for p in parts)}


def wide(value: Array) -> np.ndarray:
    """Returns an array as it is, and of rows and samples what `dense` makes of them."""
    return dense(value) if isinstance(value, Rows) else np.asarray(value)


def blocks(*arrays: Array) -> Iterator[list[np.ndarray]]:
    """Yields corresponding parts of arrays of one size, flat and in float64.

    They fit into the cache of a processor: what is computed of them needs no memory of their size.
    """
    flat = [wide(array).reshape(-1) for array in arrays]
    for start in range(0, flat[0].size, _BLOCK):
        yield [array[start : start + _BLOCK].astype(np.float64, copy=False) for array in flat]


def by_blocks(function: Callable[..., np.ndarray], *arrays: Array) -> np.ndarray:
    """Returns what a function computes of each element, in float64, from one block to the next.

    Args:
        function: takes as many arrays, flat, or numbers, and returns one of their shape.
        *arrays: arrays of one shape, or numbers.
    """
    given = [wide(array) for array in arrays]
    shapes = {array.shape for array in given if array.ndim}
    if len(shapes) != 1:
        return function(*map(dense, given))
    whole = np.empty(shapes.pop())
    found = whole.reshape(-1)
    flat = [array.reshape(-1) if array.ndim else array.astype(np.float64) for array in given]
    for start in range(0, found.size, _BLOCK):
        part = slice(start, start + _BLOCK)
        parts = (a[part].astype(np.float64, copy=False) if a.ndim else a for a in flat)
        found[part] = function(*parts)
    return whole


def length(array: np.ndarray) -> float:
    """Returns the Euclidean norm, without BLAS, whose threads wait for a core in every call."""
    return float(np.sqrt(sum(float(np.sum(np.square(part))) for (part,) in blocks(array))))


def distance(actual: Array, expected: Array) -> float:
    """Returns ‖actual − expected‖; infinite for different shapes or positions of NaN and inf."""
    a, b = wide(actual), wide(expected)
    if a.shape != b.shape:
        return np.inf
    squares = 0.0
    for first, second in blocks(a, b):
        gap = first - second
        finite = np.isfinite(gap)
        if not finite.all():
            finite = np.isfinite(first)
            if np.any(finite != np.isfinite(second)):
                return np.inf
            gap = gap[finite]
        squares += float(np.sum(np.square(gap)))
    return squares**0.5


def norm(value: Array) -> float:
    """Returns the Euclidean norm of all finite elements; of a sample that of the whole array."""
    if isinstance(value, Sampled):
        return value.norm
    squares = 0.0
    for (part,) in blocks(value):
        own = float(np.sum(np.square(part)))
        squares += own if own < np.inf else float(np.sum(np.square(part[np.isfinite(part)])))
    return squares**0.5


def total_norm(values: Mapping[str, Array]) -> float:
    """Returns the norm of all arrays together."""
    return float(np.sqrt(sum(norm(value) ** 2 for value in values.values())))


def ratio(apart: float, size: float) -> float:
    """Returns a relative distance."""
    return 0.0 if apart == 0 else float(apart / max(size, TINY))


def relative_distance(actual: Sequence[Array], expected: Sequence[Array]) -> float:
    """Returns the largest relative distance of two arrays."""
    pairs = zip(actual, expected, strict=True)
    return max((ratio(distance(a, e), norm(e)) for a, e in pairs), default=0.0)


def farthest(actual: Named, expected: Named, names: Iterable[str]) -> float:
    """Returns the largest relative distance of two arrays of a name."""
    return max(ratio(distance(actual[n], expected[n]), norm(expected[n])) for n in names)


def relative_norm(actual: Named, expected: Named) -> float:
    """Returns the relative distance of all arrays together; infinite for other names."""
    if actual.keys() != expected.keys():
        return np.inf
    apart = sum(distance(actual[n], expected[n]) ** 2 for n in expected)
    return ratio(apart**0.5, total_norm(expected))


def are_finite(values: Sequence[Array] | Mapping[str, Array]) -> bool:
    """Returns whether no element is NaN or infinite."""
    arrays = values.values() if isinstance(values, Mapping) else values
    parts = (array.values if isinstance(array, Rows) else np.asarray(array) for array in arrays)
    return all(bool(np.isfinite(a).all()) for a in parts if a.dtype.kind == "f")


def scaled(value: Array, factor: float) -> Array:
    """Returns a gradient times a factor, in its dtype."""
    if isinstance(value, Rows):
        return value._replace(values=(value.values * factor).astype(value.values.dtype))
    if isinstance(value, Sampled):
        return value.times(factor)
    return (np.asarray(value) * factor).astype(np.asarray(value).dtype)


def scaled_all(values: Named, factor: float) -> Named:
    """Returns all gradients times a factor."""
    return {name: scaled(value, factor) for name, value in values.items()}


def factor_of(actual: Sequence[Array], expected: Sequence[Array]) -> float:
    """Returns the factor that brings `expected` nearest to `actual`; NaN if `expected` is 0."""
    pairs = [(wide(a), wide(e)) for a, e in zip(actual, expected, strict=True)]
    if any(a.size != e.size for a, e in pairs):
        return np.nan
    parts = [(float(np.sum(a * e)), float(np.sum(e * e))) for x in pairs for a, e in blocks(*x)]
    product, squares = np.sum(parts, axis=0) if parts else (0.0, 0.0)
    return float(product / squares) if squares else np.nan


def fitted(columns: np.ndarray, target: np.ndarray) -> np.ndarray:
    """Returns the factors with which columns come nearest to a target; NaN if one is not finite."""
    if not (np.isfinite(columns).all() and np.isfinite(target).all()):
        return np.full(columns.shape[1], np.nan)
    return np.linalg.lstsq(columns, target, rcond=None)[0]


def is_far(actual: Array, expected: Array, allowed: float = 1e-5) -> bool:
    """Returns whether the relative distance is larger than allowed."""
    return not distance(actual, expected) <= allowed * norm(expected) + TINY


def is_within(actual: Array, expected: Array, bounds: Any) -> bool:
    """Returns whether each element is within its bound, or not finite in both."""
    whole = wide(actual), wide(expected)
    if whole[0].shape != whole[1].shape:
        return False
    for a, e, bound in blocks(*whole, np.broadcast_to(bounds, whole[0].shape)):
        with np.errstate(invalid="ignore"):
            near = np.abs(a - e) <= bound
        if not near.all() and not np.all(near | (~np.isfinite(a) & ~np.isfinite(e))):
            return False
    return True


def bits(value: Array) -> bytes:
    """Returns the bits of an array."""
    parts = value[:2] if isinstance(value, Rows) else [value]
    if isinstance(value, Sampled):
        parts = [value.elements, value.sums]
    return b"".join(np.ascontiguousarray(part).tobytes() for part in parts)


def same_bits(a: Array, b: Array) -> bool:
    """Returns whether two arrays have the same dtype, shape and bits."""
    if isinstance(a, Rows) or isinstance(b, Rows):
        return type(a) is type(b) and all(map(same_bits, a[:2], b[:2]))
    if isinstance(a, Sampled) or isinstance(b, Sampled):
        return type(a) is type(b) and a.is_same(b)
    x, y = np.asarray(a), np.asarray(b)
    if x is y:
        return True
    if x.dtype != y.dtype or x.shape != y.shape:
        return False
    unsigned = np.uint64 if x.nbytes % 8 == 0 else np.uint8
    # By bytes, as texts may have any size.
    first, second = (np.ascontiguousarray(a).reshape(-1).view(np.uint8) for a in (x, y))
    return bool(np.array_equal(first.view(unsigned), second.view(unsigned)))


def same_arrays(first: Sequence[np.ndarray], second: Sequence[np.ndarray]) -> bool:
    """Returns whether two lists of arrays are bitwise identical."""
    return len(first) == len(second) and all(map(same_bits, first, second))


def all_same_bits(a: Named, b: Named) -> bool:
    """Returns whether two mappings have the same names and bits."""
    return a.keys() == b.keys() and all(same_bits(a[name], b[name]) for name in a)


def unit_of(value: Array) -> float:
    """Returns the relative rounding error of an array's dtype, or of bfloat16 stored as float32."""
    array = np.asarray(value.values) if isinstance(value, Rows) else elements_of(value)
    if array.dtype == np.float32 and array.size:
        words = np.ascontiguousarray(array).view(np.uint32)
        return UNITS["bfloat16"] if not np.any(words & 0xFFFF) and np.any(words) else EPS
    return float(np.finfo(array.dtype).eps) if array.dtype.kind == "f" else 0.0


def sum_bound(parts: Sequence[Array], unit: float = EPS) -> np.ndarray:
    """Returns the bound of each element's error by the order of summation.

    Adding R numbers rounds R − 1 times (Higham, "Accuracy and Stability of Numerical Algorithms",
    section 4.2); `unit` is twice the error of one rounding, and each number may be rounded first.
    """
    size = np.sum([np.abs(dense(part)) for part in parts], axis=0)
    return (len(parts) + 1) * unit / 2 * size + TINY


def hashes_of(arrays: Sequence[np.ndarray]) -> list[int]:
    """Returns a number for each row of corresponding arrays, equal for equal rows."""
    rows = zip(*([np.asarray(row).tobytes() for row in array] for array in arrays), strict=True)
    return [*map(hash, rows)]


def rows_of(arrays: Sequence[np.ndarray]) -> collections.Counter:
    """Counts the rows of corresponding arrays: the examples of a shard."""
    return collections.Counter(hashes_of(arrays))


def joined(batches: Sequence[Sequence[np.ndarray]]) -> list[np.ndarray]:
    """Joins the arrays of all shards, leaf by leaf; scalars are equal on all."""
    columns = zip(*batches, strict=True)
    return [np.concatenate(parts) if parts[0].ndim else parts[0] for parts in columns]
