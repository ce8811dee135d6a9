"""How the arrays of ranks are parts of a whole one.

`"o[tp] i"` is a matrix whose first dimension is split over the axis tp. Along axes that a placement
does not name, every rank has a copy. `docs/trace_format.md` describes the notation.
"""

import functools
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple
from weakref import ref

import numpy as np

from lockstep.data.about import Fault, shown

_DIMENSION = re.compile(r"(?:(\d{1,4})\*)?(\w+)(?:\[([\w,]+)(:zigzag)?\])?")
_SUMMAND = re.compile(r"(sum|mean)\(([\w,]+)\)")


class Dimension(NamedTuple):
    """A dimension of a whole array.

    Attributes:
        axes: the axes over which it is split, the outer one first.
        blocks: number of parts of the dimension, each of which is split, as of fused matrices.
        is_zigzag: whether rank r of n holds the chunks r and 2·n − 1 − r of 2·n.
        text: how it is written.
    """

    axes: tuple[str, ...] = ()
    blocks: int = 1
    is_zigzag: bool = False
    text: str = "d"


class Placement(NamedTuple):
    """How the arrays of ranks are parts of a whole array.

    Attributes:
        dimensions: the dimensions; none if no axis splits one.
        sums, means: axes along which the ranks hold summands of a sum or a mean.
    """

    dimensions: tuple[Dimension, ...] = ()
    sums: tuple[str, ...] = ()
    means: tuple[str, ...] = ()

    @property
    def split(self) -> list[str]:
        """The axes that split dimensions."""
        return [axis for each in self.dimensions for axis in each.axes]

    @property
    def axes(self) -> set[str]:
        """All axes that the placement names."""
        return {*self.sums, *self.means, *self.split}

    def whole_shape(self, shape: Sequence[int], sizes: Mapping[str, int]) -> tuple[int, ...]:
        """Returns the shape of the whole array for that of a part, if all parts are as large.

        `sizes` has the number of ranks along each axis.
        """
        if len(self.dimensions) != len(shape):
            return tuple(shape)
        times = [math.prod(sizes[axis] for axis in each.axes) for each in self.dimensions]
        return tuple(size * number for size, number in zip(shape, times, strict=True))

    def places(
        self, shape: Sequence[int], sizes: Mapping[str, int], at: Mapping[str, int]
    ) -> list[np.ndarray] | None:
        """Returns the places of a rank's part along each dimension of a whole array.

        It is None if the rank has all of it.

        Args:
            shape: that of the whole array.
            sizes, at: the number of ranks along each axis, and the place of the rank.
        """
        if not self.split:
            return None
        found = []
        for each, length in zip(self.dimensions, shape, strict=True):
            pieces = np.array_split(np.arange(length), each.blocks)
            for axis in each.axes:
                number, i = sizes[axis], at[axis]
                for k, piece in enumerate(pieces):
                    if each.is_zigzag:
                        chunks = np.array_split(piece, 2 * number)
                        pieces[k] = np.concatenate([chunks[i], chunks[2 * number - 1 - i]])
                    else:
                        size = -(-len(piece) // number)  # As `torch.chunk`; the last may have less.
                        pieces[k] = piece[i * size : (i + 1) * size]
            found.append(np.concatenate(pieces))
        return found

    @property
    def of_sample(self) -> str:
        """How samples of the parts, which are summands, make that of the whole array."""
        sums, means = [*self.sums, *self.split], self.means
        return " ".join([*(f"sum({x})" for x in sums), *(f"mean({x})" for x in means)])


def placement_from(text: str, axes: Sequence[str] | Mapping[str, Any]) -> Placement:
    """Parses a placement, as in `"b s[cp:zigzag] d"` or `"o i sum(tp)"`.

    Args:
        text: the placement.
        axes: the names of the axes of the mesh.

    Raises:
        Fault: it is no placement on this mesh.
    """
    dimensions, reduced = [], {"sum": list[str](), "mean": list[str]()}
    for word in text.split():
        if match := _SUMMAND.fullmatch(word):
            reduced[match[1]] += match[2].split(",")
        elif match := _DIMENSION.fullmatch(word):
            split = tuple(match[3].split(",")) if match[3] else ()
            dimensions.append(Dimension(split, int(match[1] or 1), bool(match[4]), word))
        else:
            raise Fault(f"has a placement {shown(text)}, which cannot be read; use 'o[tp] i'")
    found = Placement(tuple(dimensions), tuple(reduced["sum"]), tuple(reduced["mean"]))
    named = [*found.sums, *found.means, *found.split]
    if len(named) > len({*named} & {*axes}) or any(d.blocks < 1 for d in dimensions):
        raise Fault(
            f"has a placement {shown(text)} with an axis twice, or not on the mesh with axes"
            f" {', '.join(axes)}"
        )
    return found


class Whole:
    """A global array, which is put together from those of some ranks when it is read.

    Args:
        parts: coordinates on `axes` → member of a file: an object with `shape`, `dtype`, `read`.
        axes: the axes of the coordinates.
        placement: how the parts are put together.

    Raises:
        Fault: the shapes of the parts do not fit together.
    """

    def __init__(
        self, parts: Mapping[tuple[int, ...], Any], axes: tuple[str, ...], placement: Placement
    ):
        self._parts, self._axes, self._placement = parts, axes, placement
        first = next(iter(parts.values()))
        self.dtype = first.dtype
        number = len(placement.dimensions)
        if placement.dimensions and any(len(part.shape) != number for part in parts.values()):
            raise Fault(f"has {len(first.shape)} dimensions in an array placed on {number}")
        shapes = {place: list(part.shape) for place, part in parts.items()}
        self.shape: tuple[int, ...] = tuple(self._joined(shapes, _add_sizes, _equal_shapes))
        self._array: Callable[[], np.ndarray | None] = lambda: None

    def read(self) -> np.ndarray:
        """Returns the array; the same one as long as it is in use."""
        array = self._array()
        if array is None:
            parts = {place: part.read() for place, part in self._parts.items()}
            array = self._joined(parts, _concatenate, np.add)
            for axis in self._placement.means:
                array = array / self._size(axis)
            array = np.asarray(array, self.dtype)
            self._array = ref(array)
        return array

    def _size(self, axis: str) -> int:
        where = self._axes.index(axis)
        return 1 + max(place[where] for place in self._parts)

    def _joined(self, parts: Mapping[tuple[int, ...], Any], join: Any, reduce: Any) -> Any:
        """Returns one object for those of all ranks, joined along axis after axis."""
        left, axes = dict(parts), list(self._axes)
        steps = [
            (axis, functools.partial(functools.reduce, reduce))
            for axis in (*self._placement.sums, *self._placement.means)
        ]
        for number, dimension in enumerate(self._placement.dimensions):
            along = functools.partial(join, axis=number, dimension=dimension)
            steps += [(axis, along) for axis in reversed(dimension.axes)]
        for axis, join_group in steps:
            if axis in axes:
                where, groups = axes.index(axis), dict[Any, list[Any]]()
                for place in sorted(left):
                    groups.setdefault((*place[:where], *place[where + 1 :]), []).append(left[place])
                axes.remove(axis)
                left = {place: join_group(group) for place, group in groups.items()}
        (whole,) = left.values()
        return whole


def _equal_shapes(first: list[int], second: list[int]) -> list[int]:
    if first != second:
        raise Fault(f"has summands of shapes {first} and {second}; record it again")
    return first


def _add_sizes(shapes: Sequence[list[int]], axis: int, dimension: Dimension) -> list[int]:
    whole = list(shapes[0])
    whole[axis] = sum(shape[axis] for shape in shapes)
    least = 2 if dimension.is_zigzag else dimension.blocks
    for shape in shapes:
        if shape[axis] % least:
            raise Fault(f"has a part of size {shape[axis]} that has no {least} blocks")
        if shape[:axis] + shape[axis + 1 :] != whole[:axis] + whole[axis + 1 :]:
            raise Fault(f"has parts of shapes {shapes[0]} and {shape}; record it again")
    return whole


def _concatenate(parts: Sequence[np.ndarray], axis: int, dimension: Dimension) -> np.ndarray:
    """Joins parts along a dimension, in the order of its chunks."""
    if dimension.is_zigzag:
        halves = [np.array_split(part, 2, axis) for part in parts]
        return np.concatenate([h[0] for h in halves] + [h[1] for h in reversed(halves)], axis)
    blocks = [np.array_split(part, dimension.blocks, axis) for part in parts]
    return np.concatenate([own[b] for b in range(dimension.blocks) for own in blocks], axis)
