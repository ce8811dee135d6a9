"""Puts the arrays of the ranks of a mesh together: tensor, sequence, context or pipeline parallel.

Each rank has recorded the arrays that it holds, and how they are parts of whole ones. Along axes
that a placement does not name, every rank has a copy; only data axes make replicas.
"""

import math
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from lockstep.data.layout_about import merged, moves, renamed
from lockstep.data.placement import Placement, Whole, placement_from
from lockstep.data.trace import (
    OF_BACKWARD,
    OF_GRADIENTS,
    OF_VARIABLES,
    WEIGHT,
    About,
    Mesh,
    is_of_copies,
)
from lockstep.numeric.arrays import Rows, is_far


class Assembled(NamedTuple):
    """A trace of several ranks as one.

    Attributes:
        about: the common description.
        of_replica: replica → description of its ranks.
        arrays: name of an array of a shard or a copy → the array.
        views: the same for arrays that several ranks of a shard hold → rank → its array.
        parts: name of a gradient on a rank → the part that it holds.
    """

    about: About
    of_replica: dict[int, About]
    arrays: dict[str, Any]
    views: dict[str, dict[int, Any]]
    parts: dict[str, Any]


def assemble(files: Sequence[tuple[About, Mapping[str, Any]]]) -> Assembled:
    """Puts the arrays of the files of all ranks together.

    Args:
        files: description and arrays of each file; together, they have each rank once.

    Raises:
        Fault: arrays do not fit together.
    """
    files = [(renamed(about), arrays) for about, arrays in files]
    mesh = files[0][0].on_mesh
    assert mesh is not None
    common = merged([about for about, _ in files])
    of_rank = {rank: about for about, _ in files for rank in about.ranks}
    of_replica = {
        replica: merged([of_rank[rank] for rank in mesh.ranks_of(replica)])
        for replica in range(mesh.num_replicas)
    }
    found, collected = Assembled(common, of_replica, {}, {}, {}), _collected(files, common)
    recorded = {tuple(name.split("/")[::2][:2]) for _, own in files for name in own}
    kinds = {(position, kind) for position, kind, _ in collected}
    numbers = {key: str(number) for number, key in enumerate(common.keys)}
    left_out = set[tuple[str, str]]()  # Positions and kinds.
    for (position, kind, index), by_text in collected.items():
        placed = {text: placement_from(text, mesh.axes) for text in by_text}
        number, slash, part = index.partition("/")
        if part in Rows._fields and any(placement.axes for placement in placed.values()):
            left_out.add((position, kind))  # Rows of a weight, which are not put together.
            continue
        of_copies = is_of_copies(kind, common)
        of_gradients = kind in (*OF_GRADIENTS, *OF_BACKWARD)
        names = common.gradients
        weight = numbers[names[int(number) % len(names)]] if of_gradients else ""
        if kind in OF_VARIABLES and any(placement.sums for placement in placed.values()):
            # A rank has no state of a weight of which it has no element.
            weight = numbers.get(common.variables[int(number)].of, "")
        zeros = _zeros_like(collected.get((position, "before", weight + slash + part), {}), by_text)
        # FSDP2 splits gradients over data axes, too.
        ignored = set[str]() if of_copies or of_gradients else {*mesh.data_axes}
        wholes: dict[int, Any] = {}
        for text, held in by_text.items():
            wholes |= _wholes(held, placed[text], mesh, ignored, zeros)
            for rank, part in held.items() if of_gradients else ():
                found.parts[f"{position}/{kind}/{rank}/{index}"] = part
        of_replicas = [_of_replica(wholes, replica, mesh) for replica in of_replica]
        # Sums are what is applied, unless that was recorded.
        is_later = kind in ("raw", "added") or (kind == "sums" and (position, "clipped") in kinds)
        if is_later and any(map(_differ, of_replicas)):
            left_out.add((position, kind))
        for item in range(mesh.size if of_copies else mesh.num_replicas):
            own = _nearest(wholes, item, mesh) if of_copies else of_replicas[item]
            name = f"{position}/{kind}/{item}/{index}"
            if own and (not of_copies or (position, str(item)) in recorded):
                found.arrays[name] = next(iter(own.values()))
            if len(own) > 1:
                found.views[name] = own
    for name in [n for n in found.arrays if (*n.split("/")[:2],) in left_out]:
        del found.arrays[name]
    return found


def axes_of_copies(abouts: Sequence[About]) -> list[str]:
    """Returns the axes of the model along which all ranks hold the same weights, none split."""
    mesh = abouts[0].on_mesh
    assert mesh is not None
    split, weights = set[str](), dict[int, list[str]]()
    for about in map(renamed, abouts):
        kinds = {f"before/{index}": v.kind for index, v in enumerate(about.variables)}
        for place, text in about.placements.items():
            split |= placement_from(text, mesh.axes).axes if kinds.get(place) == WEIGHT else set()
        own = [v.name for v in about.variables if v.kind == WEIGHT]
        weights |= dict.fromkeys(about.ranks, own)
    return [
        axis
        for axis, size in mesh.model_axes.items()
        if size > 1 and axis not in split
        and all(weights[mesh.along(axis, rank)[0]] == weights[rank] for rank in weights)
    ]  # fmt: skip


_UNCHANGED = {"left": "after", "set": "before"}  # Kind of what has changed → since which kind.
_Place = tuple[str, str, str]  # Position, kind, INDEX and suffix.
_Held = Mapping[str, Mapping[int, Any]]  # Placement → rank → array of the rank.


def _collected(
    files: Sequence[tuple[About, Mapping[str, Any]]], common: About
) -> dict[_Place, dict[str, dict[int, Any]]]:
    """Returns the place of each array → placement → rank → array of the rank."""
    found: dict[_Place, dict[str, dict[int, Any]]] = {}
    for about, arrays in files:
        move = moves(about, common)
        for name, array in arrays.items():
            position, kind, rank, index, *suffix = name.split("/")
            place = position, kind, "/".join([str(move(kind, int(index))), *suffix])
            text = about.placements.get(f"{kind}/{index}", "")
            found.setdefault(place, {}).setdefault(text, {})[int(rank)] = array
    for (position, kind, index), by_text in found.items():
        if kind in _UNCHANGED:  # Ranks whose part did not change.
            ranks = {rank for held in by_text.values() for rank in held}
            for text, held in found.get((position, _UNCHANGED[kind], index), {}).items():
                kept = {rank: array for rank, array in held.items() if rank not in ranks}
                by_text[text] = kept | by_text.get(text, {})
    return dict(sorted(found.items()))


def _differ(own: Mapping[int, Any]) -> bool:
    """Returns whether ranks of a replica hold parts of a sum that the script reduces later."""
    distinct = [*own.values()]
    return any(is_far(each.read(), distinct[0].read()) for each in distinct[1:])


class _Zeros(NamedTuple):
    """The gradient of a part of a weight that the loss of a rank does not use."""

    shape: tuple[int, ...]
    dtype: np.dtype

    def read(self) -> np.ndarray:
        return np.zeros(self.shape, self.dtype)


def _zeros_like(weight: _Held, gradient: _Held) -> dict[int, _Zeros]:
    """Returns rank → zeros, for those that have a part of a weight and no gradient of it."""
    parts = {rank: part for held in weight.values() for rank, part in held.items()}
    without = parts.keys() - {rank for held in gradient.values() for rank in held}
    return {rank: _Zeros(parts[rank].shape, parts[rank].dtype) for rank in without}


def _wholes(
    held: Mapping[int, Any],
    placement: Placement,
    mesh: Mesh,
    ignored: Iterable[str],
    zeros: Mapping[int, Any],
) -> dict[int, Any]:
    """Returns rank → the global array that it has a part of; `zeros` has parts of other ranks."""
    axes = tuple(axis for axis in mesh.axes if axis in placement.axes.difference(ignored))
    if not axes:
        return dict(held)
    groups: dict[Hashable, dict[tuple[int, ...], int]] = {}
    parts = {**zeros, **held}
    for rank in parts:
        at = mesh.coordinates(rank)
        others = tuple(at[axis] for axis in mesh.axes if axis not in axes)
        groups.setdefault(others, {})[tuple(at[axis] for axis in axes)] = rank
    number = math.prod(mesh.axes[axis] for axis in axes)
    wholes: dict[int, Any] = {}
    for ranks in groups.values():
        # Otherwise, some ranks have no such array, or none has one.
        if len(ranks) == number and not held.keys().isdisjoint(ranks.values()):
            whole = Whole({place: parts[rank] for place, rank in ranks.items()}, axes, placement)
            wholes |= dict.fromkeys(ranks.values(), whole)
    return wholes


def _nearest(wholes: Mapping[int, Any], rank: int, mesh: Mesh) -> dict[int, Any]:
    """Returns a rank's array, or that of the rank of another stage that has it."""
    if rank in wholes or not wholes:
        return {rank: wholes[rank]} if rank in wholes else {}
    own = mesh.coordinates(rank).items()
    nearest = max(sorted(wholes), key=lambda each: len(own & mesh.coordinates(each).items()))
    return {nearest: wholes[nearest]}


def _of_replica(wholes: Mapping[int, Any], replica: int, mesh: Mesh) -> dict[int, Any]:
    """Returns the first rank of a replica that has a global array → the array, for each."""
    own = {rank: wholes[rank] for rank in reversed(mesh.ranks_of(replica)) if rank in wholes}
    firsts = {id(whole): rank for rank, whole in own.items()}
    return {rank: own[rank] for rank in sorted(firsts.values())}
