"""Computes distances, sums, factors and bits of arrays and gradients, in float64."""

import collections
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from lockstep.numeric.memory import RECENT
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


class Lazy(dict[str, Any]):
    """Arrays by name that are read, or computed, each time they are asked for.

    Args:
        sources: name → what returns its array, or an array that is in memory.
        is_wide: whether the arrays that are asked for are dense, in float64.
    """

    def __init__(self, sources: Mapping[str, Any], *, is_wide: bool = False) -> None:
        own = sources.sources() if isinstance(sources, Lazy) else sources.items()
        super().__init__(own)
        self._is_wide, self._key, self._norms = is_wide, object(), dict[str, float]()

    def sources(self) -> Iterable[tuple[str, Any]]:
        """Returns names with what returns their arrays."""
        return super().items()

    def stored(self, name: str) -> Array:
        """Returns an array in its dtype; of a wide mapping, rows and samples as one array."""
        source = super().__getitem__(name)
        array = source() if callable(source) else source
        return wide(array) if self._is_wide else array

    def norm(self, name: str) -> float:
        """Returns the norm of an array, of a sample that of its vector; it is computed once."""
        if name not in self._norms:
            self._norms[name] = norm(wide(self.stored(name)))
        return self._norms[name]

    def __getitem__(self, name: str) -> Array:
        if not self._is_wide:
            return self.stored(name)
        return RECENT.get((self._key, name), lambda: dense(self.stored(name)))

    def __iter__(self) -> Iterator[str]:  # As `dict` calls it, copies get arrays from here.
        return super().__iter__()

    def get(self, name: str, default: Any = None) -> Any:
        """Returns an array, or another value without it."""
        return self[name] if super().__contains__(name) else default

    def values(self) -> Any:
        """Returns the arrays, one after the other."""
        return collections.abc.ValuesView(self)

    def items(self) -> Any:
        """Returns names and arrays, one after the other."""
        return collections.abc.ItemsView(self)

    def __or__(self, other: Any) -> Any:
        return Lazy(dict(self.sources()) | dict(Lazy(other).sources()), is_wide=self._is_wide)

    def __ror__(self, other: Any) -> Any:
        return Lazy(other) | self


def computed(
    names: Iterable[str], function: Callable[[str], Array], *, is_wide: bool = False
) -> Lazy:
    """Returns arrays by name that a function computes when they are asked for."""
    return Lazy({n: functools.partial(function, n) for n in names}, is_wide=is_wide)


def stored(named: Named, name: str) -> Array:
    """Returns an array in the dtype in which it is stored, if it was not computed."""
    return named.stored(name) if isinstance(named, Lazy) else named[name]


def norm_in(named: Named, name: str) -> float:
    """Returns the norm of an array of a mapping, which may know it; of a sample of its vector."""
    return named.norm(name) if isinstance(named, Lazy) else norm(wide(named[name]))


EPS = float(np.finfo(np.float32).eps)
TINY = float(np.finfo(np.float32).tiny)  # Smaller numbers may be flushed to 0.
MARGIN = 8  # A few repetitions underestimate the largest effect of rounding.
_BLOCK = 1 << 16  # Elements.
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
    names = [n for n in parts[0] if all(n in p for p in parts)]
    return computed(names, lambda n: add([p[n] for p in parts]))


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


def parts_of(*arrays: Array) -> Iterator[list[np.ndarray]]:
    """Yields corresponding parts of arrays of one shape, as `blocks` does, beside numbers as such.

    Arrays of several shapes are one part each, to be broadcast.
    """
    given = [wide(array) for array in arrays]
    if len({array.shape for array in given if array.ndim}) != 1:
        yield [*map(dense, given)]
        return
    flat = [array.reshape(-1) if array.ndim else array.astype(np.float64) for array in given]
    for start in range(0, max(array.size for array in flat), _BLOCK):
        part = slice(start, start + _BLOCK)
        yield [a[part].astype(np.float64, copy=False) if a.ndim else a for a in flat]


def by_blocks(function: Callable[..., np.ndarray], *arrays: Array) -> np.ndarray:
    """Returns what a function computes of each element, in float64, from one block to the next.

    Args:
        function: takes as many arrays, flat, or numbers, and returns one of their shape.
        *arrays: arrays of one shape, or numbers.
    """
    shapes = {np.shape(array) for array in map(wide, arrays) if array.ndim}
    if len(shapes) != 1:
        return function(*map(dense, arrays))
    whole, start = np.empty(shapes.pop()), 0
    for parts in parts_of(*arrays):
        found = np.asarray(function(*parts))
        whole.reshape(-1)[start : start + _BLOCK] = found
        start += _BLOCK
    return whole


def length(array: np.ndarray) -> float:
    """Returns the Euclidean norm, without BLAS, whose threads wait for a core in every call."""
    return float(np.sqrt(sum(float(np.sum(np.square(part))) for (part,) in blocks(array))))


def distance(actual: Array, expected: Array) -> float:
    """Returns ‖actual − expected‖; infinite for different shapes or positions of NaN and inf."""
    a, b = wide(actual), wide(expected)
    if a.shape != b.shape:
        return np.inf
    if same_bits(a, b):
        return 0.0
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
    return norm_of(part for (part,) in blocks(value))


def norm_of(parts: Iterable[np.ndarray]) -> float:
    """Returns the Euclidean norm of all finite elements of the parts of an array."""
    squares = 0.0
    for part in parts:
        own = float(np.sum(np.square(part)))
        squares += own if own < np.inf else float(np.sum(np.square(part[np.isfinite(part)])))
    return squares**0.5


def ratio(apart: float, size: float) -> float:
    """Returns a relative distance."""
    return 0.0 if apart == 0 else float(apart / max(size, TINY))


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
    return computed(values, lambda name: scaled(values[name], factor))


def factor_of(actual: Sequence[Array], expected: Sequence[Array]) -> float:
    """Returns the factor that brings `expected` nearest to `actual`; NaN if `expected` is 0."""
    pairs = [(wide(a), wide(e)) for a, e in zip(actual, expected, strict=True)]
    if any(a.size != e.size for a, e in pairs):
        return np.nan
    parts = [(float(np.sum(a * e)), float(np.sum(e * e))) for x in pairs for a, e in blocks(*x)]
    product, squares = np.sum(parts, axis=0) if parts else (0.0, 0.0)
    return float(product / squares) if squares else np.nan


def is_far(actual: Array, expected: Array, allowed: float = 1e-5) -> bool:
    """Returns whether the relative distance is larger than allowed."""
    return not distance(actual, expected) <= allowed * norm(expected) + TINY


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
    first, second = (
        np.ascontiguousarray(a).reshape(-1).view(np.uint8).view(unsigned) for a in (x, y)
    )
    parts = range(0, first.size, _BLOCK)
    return all(np.array_equal(first[i : i + _BLOCK], second[i : i + _BLOCK]) for i in parts)


def same_values(a: np.ndarray, b: np.ndarray) -> bool:
    """Returns whether two arrays of any dtypes have the same shape, and bits in float64."""
    return same_bits(a, b) or (a.shape == b.shape and all(same_bits(*x) for x in blocks(a, b)))


def same_arrays(first: Sequence[np.ndarray], second: Sequence[np.ndarray]) -> bool:
    """Returns whether two lists of arrays are bitwise identical."""
    return len(first) == len(second) and all(map(same_bits, first, second))


def all_same_bits(a: Named, b: Named) -> bool:
    """Returns whether two mappings have the same names and bits."""
    return a.keys() == b.keys() and all(same_bits(stored(a, name), stored(b, name)) for name in a)


def of_each(function: Callable[[Named], Any], copies: Sequence[Named]) -> list[Any]:
    """Returns what a function returns of each copy, called once for those that are equal."""
    found = list[Any]()
    for own in copies:
        same = (n for n in range(len(found)) if all_same_bits(own, copies[n]))
        number = next(same, None)
        found.append(function(own) if number is None else found[number])
    return found


def unit_of(value: Array) -> float:
    """Returns the relative rounding error of an array's dtype, or of bfloat16 stored as float32."""
    array = np.asarray(value.values) if isinstance(value, Rows) else elements_of(value)
    if array.dtype == np.float32 and array.size:
        words = np.ascontiguousarray(array).reshape(-1).view(np.uint32)
        parts = (words[i : i + _BLOCK] for i in range(0, words.size, _BLOCK))
        is_short = not any(np.any(part & 0xFFFF) for part in parts) and np.any(words)
        return UNITS["bfloat16"] if is_short else EPS
    return float(np.finfo(array.dtype).eps) if array.dtype.kind == "f" else 0.0


def hashes_of(arrays: Sequence[np.ndarray]) -> list[int]:
    """Returns a number for each row of corresponding arrays, equal for equal rows."""
    rows = zip(*([np.asarray(row).tobytes() for row in array] for array in arrays), strict=True)
    return [*map(hash, rows)]


def rows_of(arrays: Sequence[np.ndarray]) -> collections.Counter:
    """Counts the rows of corresponding arrays: the examples of a shard."""
    return collections.Counter(hashes_of(arrays))
