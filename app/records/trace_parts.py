"""Reads the arrays of one file of a trace, and checks their completeness, order and shapes."""

import dataclasses
import io
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from app.records.trace_about import About
from app.records.trace_file import TraceFile, errors_of, open_trace_file
from app.records.trace_member import Member, read_array
from app.records.trace_values import TraceError

_GRADIENT_KINDS = ("raw", "sums", "clipped")
_VARIABLE_KINDS = ("before", "after")
_PARTS = {"values", "indices", "rows"}


class RowMembers(NamedTuple):
    """The members of a gradient of some rows."""

    values: Member
    indices: Member
    num_rows: int


Stored = Member | RowMembers
Place = tuple[int, str, int]  # Position from 0, kind, replica.


@dataclasses.dataclass(frozen=True)
class Part:
    """The arrays of one file.

    Attributes:
        file: the file.
        arrays: position from 0, kind, replica → index → array.
    """

    file: TraceFile
    arrays: Mapping[Place, Mapping[int, Stored]]

    def listed(self, position: int, kind: str, replica: int) -> list[Stored | None] | None:
        """Returns the arrays in order, with None for arrays that did not exist."""
        found = self.arrays.get((position, kind, replica))
        if found is None:
            return None
        length = _lengths(self.file.about).get(kind, len(found))
        return [found.get(index) for index in range(length)]


def open_part(path: pathlib.Path) -> Part:
    """Opens one file of a trace.

    Raises:
        DataError: the file is not a trace, is damaged or incomplete, or is of a later version.
    """
    file = open_trace_file(path)
    with file.reading() as opened:
        grouped: dict[Place, dict[int, dict[str, Member]]] = {}
        replicas, num_steps = set(file.about.replicas), len(file.about.steps)
        for key, member in file.members.items():
            if not 1 <= key.position <= num_steps:
                raise TraceError(
                    f"has the member {member.name!r}, but {num_steps} steps; record it again"
                )
            if key.replica not in replicas:
                raise TraceError(
                    f"has the member {member.name!r}, but not that replica; record it again"
                )
            group = grouped.setdefault((key.position - 1, key.kind, key.replica), {})
            group.setdefault(key.index, {})[key.part] = member
        arrays = {
            place: {index: _stored(opened, place[1], parts) for index, parts in group.items()}
            for place, group in grouped.items()
        }
    part = Part(file, arrays)
    with errors_of(path):
        for place, found in arrays.items():
            _check_places(place, found, file.about)
        _check_shapes(part)
    return part


def _lengths(about: About) -> dict[str, int]:
    """Returns the number of arrays of the kinds with one array per variable or weight."""
    variables, gradients = len(about.variables), len(about.gradients)
    return dict.fromkeys(_VARIABLE_KINDS, variables) | dict.fromkeys(_GRADIENT_KINDS, gradients)


def _check_places(place: Place, found: Mapping[int, Stored], about: About) -> None:
    position, kind, replica = place
    name, last = f"{position + 1}/{kind}/{replica}", max(found)
    length = _lengths(about).get(kind)
    if length is None and last >= len(found):
        missing = min(set(range(len(found))) - set(found))
        raise TraceError(f"has no array {name}/{missing}, but later ones; record it again")
    if length is not None and last >= length:
        key = "variables" if kind in _VARIABLE_KINDS else "gradients"
        raise TraceError(
            f"has an array {name}/{last}, but {length} {key} in 'about'; record it again"
        )


def _stored(file: io.BufferedReader, kind: str, parts: Mapping[str, Member]) -> Stored:
    """Returns an array's member, or those of `Rows`, for which it reads the number of rows."""
    first = next(iter(parts.values()))
    if set(parts) == {""}:
        return first
    if set(parts) != _PARTS or kind not in _GRADIENT_KINDS:
        raise TraceError(
            f"the member {first.name!r} is no array, nor one of the values, indices and rows of a"
            " gradient; record it again"
        )
    values, indices, rows = (parts[part] for part in ("values", "indices", "rows"))
    is_whole = indices.dtype[1] in "iu" and rows.dtype[1] in "iu"
    if not is_whole or rows.shape != () or not values.shape:
        raise TraceError(
            f"the members {rows.name!r} and its neighbours are no rows of a gradient; record it"
            " again"
        )
    if indices.shape != values.shape[:1]:
        raise TraceError(
            f"the member {indices.name!r} has another length than the values; record it again"
        )
    return RowMembers(values, indices, int(read_array(file, rows)))


def check_indices(item: RowMembers, indices: np.ndarray) -> None:
    """Checks that the row numbers are valid.

    Raises:
        TraceError: a row number is not.
    """
    if indices.size and not (indices.min() >= 0 and indices.max() < item.num_rows):
        raise TraceError(
            f"the member {item.indices.name!r} has a row outside of 0 to {item.num_rows - 1};"
            " record it again"
        )


def shape_of(stored: Stored) -> tuple[int, ...]:
    """Returns the shape of an array; for `RowMembers`, the shape of the dense gradient."""
    if isinstance(stored, Member):
        return stored.shape
    return (stored.num_rows, *stored.values.shape[1:])


def size_of(stored: Stored) -> int:
    """Returns the bytes of an array, with its header."""
    if isinstance(stored, Member):
        return stored.size_bytes
    return stored.values.size_bytes + stored.indices.size_bytes


def _check_shapes(part: Part) -> None:
    """Checks that all arrays of a variable, and its gradients, have one shape."""
    about = part.file.about
    shapes: dict[int, tuple[int, ...]] = {}
    for index, name, stored in _named(part, _VARIABLE_KINDS):
        _check_shape(name, stored, shapes.setdefault(index, shape_of(stored)))
    indices = {v.name: i for i, v in enumerate(about.variables) if v.kind == "weight"}
    for index, name, stored in _named(part, _GRADIENT_KINDS):
        shape = shapes.get(indices[about.gradients[index]])
        if shape is not None:
            _check_shape(name, stored, shape)
        elif not isinstance(stored, Member):
            raise TraceError(
                f"has rows in {name}, but no array 'before' or 'after'; record it again"
            )


def _named(part: Part, kinds: Sequence[str]) -> Iterator[tuple[int, str, Stored]]:
    for (position, kind, replica), arrays in part.arrays.items():
        if kind in kinds:
            for index, stored in arrays.items():
                yield index, f"{position + 1}/{kind}/{replica}/{index}", stored


def _check_shape(name: str, stored: Stored, shape: tuple[int, ...]) -> None:
    if shape_of(stored) != shape:
        raise TraceError(
            f"the array {name} has shape {shape_of(stored)}, and its variable {shape}; record it"
            " again"
        )
