"""Parts of batches, and what a file has of the arrays of a process, which may be sampled."""

import collections
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from lockstep.data.placement import placement_from
from lockstep.data.trace import OF_BACKWARD, OF_GRADIENTS, OF_VARIABLES, WEIGHT
from lockstep.numeric.arrays import Rows, dense
from lockstep.numeric.sampling import Sample
from lockstep.recorders.common import axes_between

SAMPLED = {*OF_VARIABLES, *OF_GRADIENTS, *OF_BACKWARD} - {"start"}  # Kinds of arrays.
_OF_ROWS = ("y_pred", "y_grad", "module_")  # Starts of kinds whose rows are sampled.


class Members(NamedTuple):
    """What a file has of an array.

    Attributes:
        arrays: the arrays, by the ends of their names.
        shape: that of the whole array, if it is sampled; else empty.
        text: how the arrays are parts of those of the whole array.
    """

    arrays: dict[str, np.ndarray]
    shape: tuple[int, ...] = ()
    text: str = ""


def rows_of(batch: np.ndarray) -> list[bytes]:
    """Returns the bytes of each example."""
    return [row.tobytes() for row in batch] if batch.ndim else []


def places_of(
    batch: np.ndarray, parts: Sequence[Sequence[bytes]], *, partly: bool = False
) -> list[list[int]]:
    """Returns the places in a batch of the examples of each part; none if the batch has others.

    A part of which the batch lacks examples has no places; `partly`, those of its other examples.
    """
    places = collections.defaultdict[bytes, list[int]](list)
    for place, row in enumerate(rows_of(batch)):
        places[row].append(place)
    found = []
    for part in parts:
        counts = collections.Counter(part)
        is_here = partly or all(len(places[row]) >= number for row, number in counts.items())
        found.append([places[row].pop(0) for row in part if places[row]] if is_here else [])
    return [] if any(places.values()) else found


def variable_of(about: Mapping[str, Any], kind: str, index: int) -> dict[str, Any]:
    """Returns the description of the variable of an array; empty if it has none.

    Args:
        about: the description of the recording.
        kind: the kind of the array.
        index: its index among the arrays of this kind.
    """
    variables: list[dict[str, Any]] = about["variables"]
    if kind in OF_VARIABLES:
        return variables[index]
    name = about["gradients"][index] if kind in OF_GRADIENTS else ""
    weights = (each for each in variables if each["kind"] == WEIGHT)
    return next((each for each in weights if each["name"] == name), {})


def has_rows(kind: str) -> bool:
    """Returns whether the arrays of a kind have a row for each example, which may be long."""
    return kind.startswith(_OF_ROWS)


def members_of(
    sample: Sample | None, kind: str, array: np.ndarray | Rows, layout: str = "", text: str = "",
    sizes: Mapping[str, int] | None = None, at: Mapping[str, int] | None = None,
) -> Members:  # fmt: skip
    """Returns what a file has of an array of a kind, which is sampled if it is large.

    Samples have the axes in the order O, I, H, W.

    Args:
        sample: how large arrays are sampled; None for whole arrays.
        kind: the kind of the array; see `data.trace`.
        array: the array, or the part of one that this process has.
        layout: the order of its axes; "" if that has no meaning.
        text: how it is a part of the whole one; "" for all of it.
        sizes, at: the number of devices along each axis of a mesh, and the place of this one.
    """
    if isinstance(array, Rows):
        shape = (array.rows, *array.values.shape[1:])
        if not (sample and kind in SAMPLED and sample.takes(shape)):
            return Members({f"/{end}": np.asarray(x) for end, x in array._asdict().items()})
        array = dense(array).astype(array.values.dtype)
    if sample and has_rows(kind) and not text:
        return Members({"": sample.of_rows(array)})
    placement = placement_from(text, sizes or {})
    shape = placement.whole_shape(array.shape, sizes or {})
    if not sample or kind not in SAMPLED or not sample.takes(shape):
        return Members({"": array}, text=text)
    part = placement.places(shape, sizes or {}, at or {})
    axes = _usual_axes(layout, array.ndim)
    ordered = [shape[k] for k in axes]
    own = sample.members(np.transpose(array, axes), ordered, part and [part[k] for k in axes])
    return Members({f"/{end}": each for end, each in own.items()}, shape, placement.of_sample)


def _usual_axes(layout: str, ndim: int) -> tuple[int, ...]:
    usual = "".join(sorted(layout, key="OIHW".find)) if len(layout) == ndim else ""
    return axes_between(layout, usual, ndim)
