"""Puts arrays of modules in two traces side by side: each rank's, of the same examples."""

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from lockstep.context import Context
from lockstep.data.trace import Mesh
from lockstep.explain.pairing import Located, Part
from lockstep.numeric.arrays import dense
from lockstep.stages.forward import rows_apart

_BLOCKS = (1, 2, 3, 4, 6, 8)  # Of a dimension, each of which is split.

Rows = tuple[np.ndarray, np.ndarray]  # Of the same examples in both traces.


class Event(NamedTuple):
    """An array of a module: its input or output, or the gradient of the loss by it."""

    module: str
    is_output: bool


def events_of(modules: Sequence[str]) -> list[Event]:
    """Returns inputs and outputs in time; modules are in the order of their first calls."""
    found, open_modules = [], list[str]()
    for name in modules:
        while open_modules and not name.startswith(f"{open_modules[-1]}."):
            found.append(Event(open_modules.pop(), True))
        open_modules.append(name)
        found.append(Event(name, False))
    return [*found, *(Event(name, True) for name in reversed(open_modules))]


class ModuleArrays:
    """The arrays of modules in a step of two traces.

    Args:
        first: the step in the reference.
        second: the step in the trace that is checked.
    """

    def __init__(self, first: Context, second: Context):
        self._first, self._second = first, second
        # Event, shard and number of a forward pass → axis of the examples.
        self._axes: dict[tuple[Event, int, int], int | None] = {}

    def rows(
        self, event: Event, located: Located, is_backward: bool, sum_over: str = ""
    ) -> list[Rows]:
        """Returns each rank's array of an event, of the same examples as in the reference.

        Args:
            event: the event.
            located: the examples.
            is_backward: whether gradients are asked for.
            sum_over: axis of the mesh over which the arrays of ranks are added, if they differ.
        """
        kind = ("module_out" if event.is_output else "module_in") + "_grad" * is_backward
        parts = {(p.shard, p.number): p for p, _ in located.sources}
        arrays = {
            key: _copies(self._first, kind, part, event.module).get(-1)
            for key, part in parts.items()
        }
        like = next(iter(arrays.values()))
        if like is None or any(array is None for array in arrays.values()):
            return []
        copies = _copies(self._second, kind, located.part, event.module)
        mesh, options = self._second.trace.mesh, list[list[Rows]]()
        if mesh and sum_over:
            groups = groups_along(sum_over, copies, mesh)
            if all(np.array_equal(own, group[0]) for group in groups for own in group):
                return []  # Copies of a mean, or of another array that is wrong.
            copies = {number: np.sum(group, axis=0) for number, group in enumerate(groups)}
        for whole in wholes_of(copies, like, mesh) if mesh else [[*copies.values()][:1]]:
            rows = [self._aligned(event, located, arrays, own, is_backward) for own in whole]
            options.append([each for each in rows if each is not None])
        return min(options, key=lambda each: max((apart(r, 1.0) for r in each), default=np.inf),
                   default=[])  # fmt: skip

    def _aligned(
        self, event: Event, located: Located, arrays: Mapping[tuple[int, int], np.ndarray | None],
        own: np.ndarray, is_backward: bool,
    ) -> Rows | None:  # fmt: skip
        """Returns the arrays of the same examples; None if they cannot be compared."""
        part, keys = located.part, [(p.shard, p.number) for p, _ in located.sources]
        parts = dict(zip(keys, (p for p, _ in located.sources), strict=True))
        found: dict[int | None, Rows] = {}  # Axis of the examples → arrays.
        for axis in (0, 1):
            by_example = {key: _by_example(arrays[key], parts[key], axis) for key in parts}
            of_own = _by_example(own, part, axis)
            if of_own is None or any(each is None for each in by_example.values()):
                continue
            places = zip(keys, located.sources, strict=True)
            a = [dense(by_example[key])[row] for key, (_, row) in places]
            if {each.shape for each in a} == {of_own.shape[1:]}:
                found[axis] = np.stack(a), of_own[located.rows]
        like = dense(arrays[keys[0]])
        if like.shape == own.shape:  # Such as the embeddings of places, the same for all examples.
            found[None] = like[None], own[None]
        place = event, part.shard, part.number
        if not is_backward and found:
            # Of equal pairs, an example is farther by the root of their number at most.
            times = {axis: 2 * len(located.rows) ** 0.5 if axis is None else 1 for axis in found}
            self._axes[place] = min(found, key=lambda axis: times[axis] * apart(found[axis], 1.0))
        # The gradient of an array without examples is a sum over those of a batch.
        best = self._axes.get(place)
        return found.get(best) if best is not None or not is_backward else None


def _copies(step: Context, kind: str, part: Part, module: str) -> dict[int, np.ndarray]:
    """Returns rank → its array of a module; with -1 → that of any rank."""
    index = step.trace.index_of(module, part.shard, part.number)
    found = step.trace.of_module(step.position, kind, part.shard, part.number, module)
    if found is None or index is None:
        return {}
    return {-1: found} | step.trace.views(step.position, kind, part.shard, index)


def groups_along(axis: str, copies: Mapping[int, np.ndarray], mesh: Mesh) -> list[list[np.ndarray]]:
    """Returns groups of the arrays of ranks along an axis; none if one is missing."""
    groups: dict[tuple[int, ...], dict[int, np.ndarray]] = {}
    for rank, array in copies.items():
        if rank >= 0:
            at = mesh.coordinates(rank)
            others = tuple(place for name, place in at.items() if name != axis)
            groups.setdefault(others, {})[at[axis]] = array
    found = [[own[place] for place in sorted(own)] for own in groups.values()]
    is_whole = all(
        len(own) == mesh.axes[axis] and len({array.shape for array in own}) == 1 for own in found
    )
    return found if is_whole else []


def wholes_of(
    copies: Mapping[int, np.ndarray], like: np.ndarray, mesh: Mesh
) -> Iterator[list[np.ndarray]]:
    """Yields the global arrays of ranks whose own arrays may be parts of them.

    The shape of the reference's array says whether a dimension is split; it may consist of blocks,
    such as queries, keys and values, each of which is split.
    """
    arrays = [array for rank, array in copies.items() if rank >= 0 or len(copies) == 1]
    shape = arrays[0].shape if arrays else ()
    other = [
        d for d in range(1, len(shape)) if shape[1:] and shape[d : d + 1] != like.shape[d : d + 1]
    ]
    if len(shape) != like.ndim or not other:
        yield arrays
        return
    for axis in mesh.model_axes if len(other) == 1 else ():
        if shape[other[0]] * mesh.axes[axis] != like.shape[other[0]]:
            continue
        for number in _BLOCKS:
            if shape[other[0]] % number == 0:
                yield [
                    np.concatenate(
                        [
                            np.split(own, number, other[0])[b]
                            for b in range(number)
                            for own in group
                        ],
                        other[0],
                    )
                    for group in groups_along(axis, copies, mesh)
                ]


def _by_example(array: np.ndarray | None, part: Part, axis: int) -> np.ndarray | None:
    """Returns an array with one entry for each example; None if it has another shape."""
    size = len(part.arrays["data"][0])
    if array is None or array.ndim <= axis or not size:
        return None
    if axis:
        return np.moveaxis(array, 1, 0)[:, None] if array.shape[1] == size else None
    rows, rest = divmod(len(array), size)
    return None if rest else array.reshape(size, rows, *array.shape[1:])


def apart(rows: Rows, factor: float) -> float:
    """Returns the largest relative distance of the arrays of an example; inf for NaN."""
    far = float(np.max(rows_apart([rows], factor), initial=0.0))
    return np.inf if np.isnan(far) else far
