"""The gradients that a step keeps: their weights, and how they are parts of whole ones.

A step may keep anything. What is no gradient of the weights, or a part of one that cannot be put
together, is left out, and the verdict says so.
"""

import itertools
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from lockstep.data.placement import placement_from
from lockstep.data.trace import WEIGHT
from lockstep.recorders.jax.keeping import GRADIENTS

_DATA_AXES = r"(dp|data|fsdp|ddp|replica|shard|batch)"  # Starts of names of axes of a mesh.
_Columns = dict[str, Any]  # Kind → for each array, that of each replica here.


class GradientsKept:
    """The gradients of the recorded steps.

    Attributes:
        names: the weights whose gradients are kept.
        left_out: sentences that say which kinds are not recorded, and why, in order; each is a key.
    """

    def __init__(self) -> None:
        self.names, self.left_out = list[str](), dict[str, None]()

    def match(
        self, found: _Columns, kept: Mapping[str, Sequence[str]], weights: Sequence[str],
        given: Mapping[str, str],
    ) -> dict[str, str]:  # fmt: skip
        """Sorts the gradients of a step by `names`, to which it adds those that are new.

        Args:
            found: kind → columns, which changes; [] is that of a weight without a gradient.
            kept: kind → the paths of the arrays that the step keeps.
            weights: the names of the weights, which are the first arrays of "before".
            given: KIND/INDEX → how the arrays of `keep` are parts, where the step says so.

        Returns:
            `given` with the indices that the gradients have now.
        """
        placements = {k: text for k, text in given.items() if k.split("/")[0] not in GRADIENTS}
        for kind in GRADIENTS:
            if kind not in found:
                continue
            own = matched(kept.get(kind, ()), weights)
            shapes = [column[0].shape for column in found["before"][: len(weights)]]
            if own is None and (unraveled := _unraveled(found[kind], shapes)):
                own, found[kind] = [*weights], unraveled
            if own is None or len(own) != len(found[kind]):
                paths = ", ".join([*kept.get(kind, ())][:3])
                self._leave_out(found, kind, f"its arrays match no weights by name: {paths}")
                continue
            self.names += [name for name in own if name not in self.names]
            columns = dict(zip(own, found[kind], strict=True))
            found[kind] = [columns.get(name, []) for name in self.names]
            for index, name in enumerate(own):
                if text := given.get(f"{kind}/{index}"):
                    placements[f"{kind}/{self.names.index(name)}"] = text
        return placements

    def join(
        self, found: _Columns, placements: Mapping[str, str], shapes: Mapping[str, Any]
    ) -> None:
        """Puts parts together that the devices of a step without a mesh keep.

        Args:
            found: kind → columns of all devices, which changes.
            placements: KIND/INDEX → how arrays are parts, as far as it is known.
            shapes: weight → its shape.
        """
        for kind in GRADIENTS:
            if kind not in found:
                continue
            columns = found[kind]
            for index, (name, column) in enumerate(zip(self.names, columns, strict=False)):
                if column and column[0].shape != shapes[name]:
                    columns[index] = _joined(column, placements.get(f"{kind}/{index}", ""))
            self._check(found, kind, [np.shape(c[0]) if c else () for c in columns], shapes)

    def place(
        self, found: _Columns, placements: dict[str, str], sizes: Mapping[str, int],
        variables: Sequence[Mapping[str, Any]], batch_axes: Sequence[str],
    ) -> None:  # fmt: skip
        """Says how gradients on a mesh are parts, and leaves out those of which it is not known.

        Without `specs`, an array that has the shape of a device's part of the weight, or of a state
        of its optimizer, is such a part.

        Args:
            found: kind → columns, which changes.
            placements: KIND/INDEX → how arrays are parts, which changes.
            sizes: axis of the mesh → its size.
            variables: the descriptions of the state.
            batch_axes: the axes that split the examples.
        """
        parts = dict[str, list[tuple[tuple[int, ...], str]]]()  # Weight → shapes and placements.
        for index, variable in enumerate(variables):
            of = variable["name"] if variable["kind"] == WEIGHT else variable.get("of", "")
            part = found["before"][index][0].shape, placements.get(f"before/{index}", "")
            parts.setdefault(of, []).insert(0 if of == variable["name"] else len(parts[of]), part)
        wholes = {name: _whole_shape(*parts[name][0], sizes) for name in self.names}
        sums = found.get("sums")
        for kind in GRADIENTS:
            if kind not in found:
                continue
            source, shapes = "sums" if found[kind] is sums else kind, list[tuple[int, ...]]()
            for index, (name, column) in enumerate(zip(self.names, found[kind], strict=False)):
                shape = column[0].shape if column else ()
                known = [text for own, text in parts[name] if own == shape]
                text = placements.get(f"{source}/{index}") or next(iter(known), "")
                shapes.append(_whole_shape(shape, text, sizes))
                placements[f"{kind}/{index}"] = text
            self._check(found, kind, shapes, wholes)
        split = split_of_raw(placements, sizes) & {*batch_axes}
        if wrong := [axis for axis in sorted(split) if re.match(_DATA_AXES, axis)]:
            why = f"it is split over {wrong[0]!r}, an axis of the batch; keep sums as 'sums' only"
            self._leave_out(found, "raw", why)
        for key in [key for key in placements if key.split("/")[0] in {*GRADIENTS} - {*found}]:
            del placements[key]

    def _check(
        self, found: _Columns, kind: str, own: Sequence[Any], wholes: Mapping[str, Any]
    ) -> None:
        """Leaves out a kind of which a whole array has another shape than its weight."""
        for name, column, shape in zip(self.names, found[kind], own, strict=False):
            if column and shape != wholes[name]:
                why = f"it has shape {shape} for {name}, which has {wholes[name]}; pass specs="
                self._leave_out(found, kind, why)
                return

    def _leave_out(self, found: _Columns, kind: str, why: str) -> None:
        """Removes a kind; without those after "raw", it is not known what the step applies."""
        if kind in found:
            self.left_out[f"keep({kind!r}): {why}"] = None
            for each in GRADIENTS if kind != "raw" else ("raw",):
                found.pop(each, None)


def split_of_raw(placements: Mapping[str, str], sizes: Mapping[str, int]) -> set[str]:
    """Returns the axes of the mesh that split the gradients of the devices."""
    texts = [text for key, text in placements.items() if key.startswith("raw/")]
    return {axis for text in texts for axis in placement_from(text, sizes).split}


def matched(paths: Sequence[str], weights: Sequence[str]) -> list[str] | None:
    """Returns the weight of each path in a tree of gradients; None if one is not known.

    A tree may be one of a part of the weights, or hold them in a further tree; a list has one array
    for each weight, in the order of `jax.tree.leaves(params)`.

    Args:
        paths: names of the arrays, with the keys of the tree from its root, as in "block/kernel".
        weights: those of the weights.
    """
    known = {*weights}
    if known.issuperset(paths):
        return [*paths]
    if len(paths) == len(weights) and all(path.isdigit() for path in paths):
        return [*weights]
    found = []
    for path in paths:
        fitting = [w for w in weights if w.endswith(f"/{path}") or path.endswith(f"/{w}")]
        found += fitting if len(fitting) == 1 else [""]
    is_known = len({*found}) == len(paths) and "" not in found
    return found if is_known else None


def _unraveled(columns: Sequence[Any], shapes: Sequence[tuple[int, ...]]) -> list[Any]:
    """Returns columns of gradients that one vector holds, as of `ravel_pytree`; else none."""
    ends = [*itertools.accumulate(math.prod(shape) for shape in shapes)]
    if len(columns) != 1 or columns[0][0].shape != (ends[-1],):
        return []
    parts = [np.split(vector, ends[:-1]) for vector in columns[0]]
    return [
        [part.reshape(shape) for part in column]
        for column, shape in zip(zip(*parts, strict=True), shapes, strict=True)
    ]


def _whole_shape(shape: Sequence[int], text: str, sizes: Mapping[str, int]) -> tuple[int, ...]:
    return placement_from(text, sizes).whole_shape(shape, sizes)


def _joined(column: Sequence[np.ndarray], text: str) -> Sequence[np.ndarray]:
    """Returns the whole array for each device, if one dimension is split over all of them."""
    words = text.split()
    split = [index for index, word in enumerate(words) if "[" in word]
    if len(split) != 1 or len({part.shape for part in column}) > 1:
        return column
    return [np.concatenate(column, split[0])] * len(column)
