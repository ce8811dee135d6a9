"""Takes samples of large arrays: elements at seeded places, random sums of all, and the norm.

Of an array with more than N elements, a sampled recording keeps N, one from each of N equal ranges
in row-major order; K sums of all elements, each with a random sign; and the sum of squares. Places
and signs depend on the shape and the seed alone, so that two recordings of one training have the
same ones, whatever its weights are called. All but the squares is linear: sums of samples are
samples of sums, of gradients, and of the parts of an array that several ranks hold.

A sign is the product of that of the first index and that of the others, so that K sums cost one
multiplication of matrices. The K sums over √K have about the norm of the whole array, and keep
distances: what changes one element, or one row, changes them by as much. Of independent errors of
rounding, a sum has the 2-norm; `with_sums` gives its bound.

A `Sampled` array converts to a vector of float64: the elements, then the sums over √K.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

NUM_SUMS = 8
CHUNK = 1 << 17  # Elements that are converted to float64 at a time: they stay in a cache.
_SLACK = 2  # Times the root mean square, of K sums of independent errors.
_SUMS_AGREE = 2.0**-40  # Relative; float64 sums in another order.

Indices = Sequence[np.ndarray]  # For each dimension, the places of a part of an array in the whole.


class Sample(NamedTuple):
    """How large arrays are sampled.

    Attributes:
        elements: N, the number of elements; smaller arrays are whole.
        sums: K, the number of sums.
        seed: chooses places and signs.
    """

    elements: int
    sums: int = NUM_SUMS
    seed: int = 0

    @property
    def length(self) -> int:
        """The length of the vector of a sample."""
        return self.elements + self.sums

    def takes(self, shape: Sequence[int]) -> bool:
        """Returns whether arrays of a shape are sampled."""
        return math.prod(shape) > self.elements

    def places(self, shape: Sequence[int]) -> np.ndarray:
        """Returns the places `(N,)` of the elements in row-major order, ascending."""
        return _places(self, tuple(shape))

    def signs(self, shape: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
        """Returns the signs of the first index `(K, shape[0])`, and of the others `(K, …)`."""
        return _signs(self, tuple(shape))

    def select(self, shape: Sequence[int], part: Indices | None = None) -> "Selection":
        """Returns what is kept of a part of an array of a shape; of all of it without a part."""
        places: tuple[np.ndarray, ...] = np.unravel_index(self.places(shape), tuple(shape))
        rows, columns = self.signs(shape)
        is_here = np.ones(self.elements, bool)
        if part is None:
            return Selection(places, is_here, rows, columns)
        local = []
        for along, length, own in zip(places, shape, part, strict=True):
            numbers = np.full(length, -1)
            numbers[own] = np.arange(len(own))
            local.append(numbers[along])
        is_here = np.all([along >= 0 for along in local], axis=0)
        columns = columns[np.ix_(np.arange(self.sums), *part[1:])]
        return Selection(
            tuple(along[is_here] for along in local), is_here, rows[:, part[0]], columns
        )

    def members(
        self, array: np.ndarray, shape: Sequence[int], part: Indices | None = None
    ) -> dict[str, np.ndarray]:
        """Returns what a file has of an array, or of the part of one that this process has.

        Args:
            array: the array, or the part.
            shape: the shape of the whole array.
            part: for each dimension, the places of the part in the whole; None for all.

        Returns:
            "elements", 0 where another process has them, and "sums", those of the part, then that
            of its squares.
        """
        own = self.select(shape, part)
        elements = np.zeros(self.elements, array.dtype)
        elements[own.is_here] = array[own.places]
        sums = sums_of(array, own.rows, own.columns, lambda x: np.asarray(x, np.float64))
        return {"elements": elements, "sums": np.append(*sums)}

    def of(self, array: np.ndarray) -> "Sampled":
        """Returns the sampled array."""
        found = self.members(array, array.shape)
        return Sampled(found["elements"], found["sums"][:-1], float(found["sums"][-1]))

    def of_rows(self, array: np.ndarray) -> np.ndarray:
        """Returns samples of the rows of outputs: elements, then sums over √K, in the same dtype.

        Short rows stay as they are.
        """
        if array.ndim < 2 or not self.takes(array.shape[1:]):
            return array
        rows = [np.asarray(self.of(row)).astype(array.dtype) for row in array]
        return np.stack(rows) if rows else np.zeros((0, self.length), array.dtype)


class Selection(NamedTuple):
    """What is kept of a part of an array.

    Attributes:
        places: for each dimension, the places in the part of the elements that it has.
        is_here: `(N,)`, whether the part has an element.
        rows, columns: the signs of the first index of the part, and of its others.
    """

    places: tuple[np.ndarray, ...]
    is_here: np.ndarray
    rows: np.ndarray
    columns: np.ndarray


def sums_of(
    array: Any, rows: np.ndarray, columns: np.ndarray, to_float64: Callable[[Any], Any]
) -> tuple[Any, Any]:
    """Returns the K sums, and that of squares; computed for some rows at a time.

    Args:
        array: an array, or a tensor of a framework.
        rows, columns: the signs of its first index, and of its others.
        to_float64: returns an array, or a part of `array`, as the framework computes with it.
    """
    width = max(math.prod(array.shape[1:]), 1)
    signs, number = to_float64(rows), max(CHUNK // width, 1)
    total, squares = to_float64(np.zeros((len(rows), width))), to_float64(np.zeros(()))
    with np.errstate(all="ignore"):  # Of gradients that overflow.
        for start in range(0, len(array), number):
            chunk = to_float64(array[start : start + number]).reshape(-1, width)
            total += signs[:, start : start + number] @ chunk
            squares += (chunk * chunk).sum()
        return (total * to_float64(columns).reshape(len(rows), width)).sum(1), squares


@functools.lru_cache(maxsize=1024)
def _places(sample: Sample, shape: tuple[int, ...]) -> np.ndarray:
    ends = np.arange(sample.elements + 1) * math.prod(shape) // sample.elements
    # A legacy generator: its numbers are the same in all versions of NumPy.
    drawn = np.random.RandomState([sample.seed, 0, *shape]).random_sample(sample.elements)
    return ends[:-1] + (drawn * np.diff(ends)).astype(np.int64)


@functools.lru_cache(maxsize=1024)
def _signs(sample: Sample, shape: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
    generator = np.random.RandomState([sample.seed, 1, *shape])
    sizes = (sample.sums, shape[0]), (sample.sums, *shape[1:])
    rows, columns = (generator.randint(0, 2, size).astype(np.int8) * 2 - 1 for size in sizes)
    return rows, columns


class Sampled(np.lib.mixins.NDArrayOperatorsMixin):
    """A large array of which a sample is known.

    Args:
        elements: `(N,)`, in the dtype of the array.
        sums: `(K,)`, float64.
        squares: the sum of squares of all elements.
    """

    def __init__(self, elements: np.ndarray, sums: np.ndarray, squares: float):
        self.elements, self.sums, self.squares = elements, sums, squares

    def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
        sums = self.sums / max(len(self.sums), 1) ** 0.5
        return np.concatenate([self.elements, sums]).astype(dtype or np.float64, copy=False)

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **options: Any) -> Any:
        arrays = (np.asarray(x) if isinstance(x, Sampled) else x for x in inputs)
        return getattr(ufunc, method)(*arrays, **options)

    @property
    def shape(self) -> tuple[int]:
        """The shape of the vector."""
        return (len(self.elements) + len(self.sums),)

    @property
    def size(self) -> int:
        """The length of the vector."""
        return self.shape[0]

    @property
    def ndim(self) -> int:
        """The number of dimensions of the vector."""
        return 1

    @property
    def dtype(self) -> np.dtype:
        """The dtype of the array."""
        return self.elements.dtype

    @property
    def norm(self) -> float:
        """The 2-norm of the whole array; of the sample if an element is not finite."""
        if np.isfinite(self.squares):
            return float(self.squares**0.5)
        return float(np.sqrt(np.sum(np.square(self.elements[np.isfinite(self.elements)]))))

    def times(self, factor: float) -> "Sampled":
        """Returns the array times a factor, in its dtype."""
        elements = (self.elements * factor).astype(self.dtype)
        return Sampled(elements, self.sums * factor, self.squares * factor**2)

    def plus(self, other: "Sampled") -> "Sampled":
        """Returns the sum of two arrays; its norm is that of its sums."""
        sums = self.sums + other.sums
        squares = float(np.mean(np.square(sums)))
        return Sampled(self.elements + other.elements, sums, squares)

    def is_same(self, other: "Sampled") -> bool:
        """Returns whether elements are bitwise identical, and sums but for their order."""
        if self.dtype != other.dtype or self.elements.tobytes() != other.elements.tobytes():
            return False
        allowed = _SUMS_AGREE * self.norm
        is_near = np.abs(self.sums - other.sums) <= allowed
        are_odd = ~np.isfinite(self.sums) & ~np.isfinite(other.sums)
        return bool(np.all(is_near | are_odd))


def with_sums(bound: np.ndarray, num_sums: int) -> np.ndarray:
    """Returns bounds of the elements of a vector, whose last ones are sums.

    Args:
        bound: bounds, those of sums computed like those of elements: a sum may cancel.
        num_sums: K; 0 for an array that is whole.
    """
    if not num_sums:
        return bound
    of_sum = _SLACK * np.sqrt(np.mean(np.square(bound[-num_sums:])))
    return np.concatenate([bound[:-num_sums], np.full(num_sums, of_sum)])


def without_sums(vector: np.ndarray, num_sums: int) -> np.ndarray:
    """Returns the elements of a vector whose last ones are sums; all if `num_sums` is 0."""
    return vector[: len(vector) - num_sums] if num_sums else vector
