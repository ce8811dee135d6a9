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
from lockstep.recorders.jax.paths import matched

# Starts of names of axes that split the batch alone; another one may split a model's layers, too.
_DATA_AXES = r"(dp|data|fsdp|ddp|replica|shard|batch)"
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
        self, found: _Columns, kept: Mapping[str, Sequence[str]], weights: Mapping[str, str],
        given: Mapping[str, str],
    ) -> dict[str, str]:  # fmt: skip
        """Sorts the gradients of a step by `names`, to which it adds those that are new.

        Args:
            found: kind → columns, which changes; [] is that of a weight without a gradient.
            kept: kind → the paths of the arrays in the tree that the step keeps.
            weights: path of a weight → its name; they are the first of "before".
            given: KIND/INDEX → how the arrays of `keep` are parts, where the step says so.

        Returns:
            `given` with the indices that the gradients have now.
        """
        placements = {k: text for k, text in given.items() if k.split("/")[0] not in GRADIENTS}
        shapes = [column[0].shape for column in found["before"][: len(weights)]]
        for kind in GRADIENTS:
            if kind not in found:
                continue
            paths = matched(kept[kind], [*weights])
            if paths is None and (unraveled := _unraveled(found[kind], shapes)):
                paths, found[kind] = [*weights], unraveled
            if paths is None:
                first = ", ".join(kept[kind][:3])
                self._leave_out(found, kind, f"its arrays match no weights by structure: {first}")
                continue
            own = [weights[path] for path in paths]
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
        for kind in (kind for kind in GRADIENTS if kind in found):
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

        Without `specs`, the gradient of a device's part of a weight is a part as the weight is.

        Args:
            found: kind → columns, which changes.
            placements: KIND/INDEX → how arrays are parts, which changes.
            sizes: axis of the mesh → its size.
            variables: the descriptions of the state.
            batch_axes: the axes that split the examples.
        """
        parts = {
            variable["name"]: (found["before"][index][0].shape, placements[f"before/{index}"])
            for index, variable in enumerate(variables) if variable["kind"] == WEIGHT
        }  # fmt: skip
        wholes = {
            name: placement_from(text, sizes).whole_shape(shape, sizes)
            for name, (shape, text) in parts.items()
        }
        for kind in (kind for kind in GRADIENTS if kind in found):
            shapes = list[tuple[int, ...]]()
            for index, (name, column) in enumerate(zip(self.names, found[kind], strict=False)):
                shape = column[0].shape if column else ()
                text = placements.get(f"{kind}/{index}", "")
                if not text and parts[name][0] == shape:
                    text = parts[name][1]
                placements[f"{kind}/{index}"] = text
                shapes.append(placement_from(text, sizes).whole_shape(shape, sizes))
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


def _joined(column: Sequence[np.ndarray], text: str) -> Sequence[np.ndarray]:
    """Returns the whole array for each device, if one dimension is split over all of them."""
    split = [index for index, word in enumerate(text.split()) if "[" in word]
    if len(split) != 1 or len({part.shape for part in column}) > 1:
        return column
    return [np.concatenate(column, split[0])] * len(column)
