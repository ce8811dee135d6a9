"""The gradients that a step keeps: their weights, and how they are parts of whole ones.

A step may keep anything. What is no gradient of the weights, or a part of one that cannot be put
together, is left out, and the verdict says so.
"""

import itertools
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from lockstep.data.placement import placement_from
from lockstep.recorders.jax.keeping import GRADIENTS
from lockstep.recorders.jax.paths import matched

# Starts of names of axes that split the batch alone; another one may split a model's layers, too.
_DATA_AXES = r"(dp|data|fsdp|ddp|replica|shard|batch)"
_Column = Sequence[np.ndarray]  # An array of each replica here.


class _LeftOutError(Exception):
    """Says why a kind is not recorded."""


class Weight(NamedTuple):
    """A weight: its name, the shape that a device has, and how that is a part of the whole."""

    name: str
    shape: tuple[int, ...]
    text: str


class Gradients:
    """The gradients of the recorded steps.

    Attributes:
        names: the weights whose gradients are kept.
        left_out: sentences that say which kinds are not recorded, and why, in order; each is a key.
    """

    def __init__(self) -> None:
        self.names, self.left_out = list[str](), dict[str, None]()

    def sort(
        self, kept: Mapping[str, Any], paths: Mapping[str, Sequence[str]],
        texts: Mapping[str, Sequence[str]], weights: Mapping[str, Weight],
        sizes: Mapping[str, int], batch_axes: Sequence[str],
    ) -> tuple[dict[str, list[_Column]], dict[str, str]]:  # fmt: skip
        """Sorts the gradients of a step by `names`, to which it adds those that are new.

        Args:
            kept: kind → columns.
            paths: kind → the path of each in the tree that the step keeps.
            texts: kind → how each is a part of a whole one, where the step says so.
            weights: the path of each weight → what is known of it.
            sizes: axis of the mesh → its size; empty without a mesh.
            batch_axes: the axes that split the examples.

        Returns:
            Kind → columns; [] is that of a weight without a gradient. "KIND/INDEX" → how the arrays
            are parts.
        """
        found = dict[str, dict[str, tuple[_Column, str]]]()
        for kind in [kind for kind in GRADIENTS if kind in kept]:
            try:
                found[kind] = _placed(kept[kind], paths[kind], texts[kind], weights, sizes)
                split = split_by((text for _, text in found[kind].values()), sizes)
                wrong = sorted(x for x in split & {*batch_axes} if re.match(_DATA_AXES, x))
                if kind == "raw" and wrong:
                    raise _LeftOutError(
                        f"it is split over {wrong[0]!r}, an axis of the batch; keep sums as 'sums'"
                        " only"
                    )
            except _LeftOutError as error:
                self.left_out[f"keep({kind!r}): {error}"] = None
                if kind != "raw":  # Without a later kind, it is not known what the step applies.
                    return {}, {}
                found.pop(kind, None)
        names = dict.fromkeys(itertools.chain(*found.values()))
        self.names += [name for name in names if name not in self.names]
        columns = {
            kind: [own[name][0] if name in own else [] for name in self.names]
            for kind, own in found.items()
        }
        placements = {
            f"{kind}/{self.names.index(name)}": text
            for kind, own in found.items() for name, (_, text) in own.items()
        }  # fmt: skip
        return columns, placements


def split_by(texts: Iterable[str], sizes: Mapping[str, int]) -> set[str]:
    """Returns the axes of the mesh that split arrays."""
    return {axis for text in texts for axis in placement_from(text, sizes).split}


def _placed(
    columns: Sequence[_Column], paths: Sequence[str], texts: Sequence[str],
    weights: Mapping[str, Weight], sizes: Mapping[str, int],
) -> dict[str, tuple[_Column, str]]:  # fmt: skip
    """Returns weight → its gradient on each device, and how that is a part of the whole one.

    Without a mesh, parts are put together. On a mesh, where the step says nothing, the gradient of
    a device's part of a weight is a part as the weight is.

    Raises:
        _LeftOutError: these are no gradients of the weights.
    """
    own = matched(paths, [*weights])
    if own is None:
        first = ", ".join(paths[:3])
        raise _LeftOutError(f"its arrays match no weights by structure: {first}")
    found = dict[str, tuple[_Column, str]]()
    for path, column, given in zip(own, columns, texts or [""] * len(own), strict=True):
        name, part, text_of_weight = weights[path]
        text = given or (text_of_weight if column[0].shape == part else "")
        if not sizes:
            column, text = column if column[0].shape == part else _joined(column, text), ""
        wholes = [
            placement_from(text, sizes).whole_shape(shape, sizes)
            for text, shape in ((text, column[0].shape), (text_of_weight, part))
        ]
        if wholes[0] != wholes[1]:
            raise _LeftOutError(
                f"it has shape {wholes[0]} for {name}, which has {wholes[1]}; pass specs="
            )
        found[name] = column, text
    return found


def _joined(column: _Column, text: str) -> _Column:
    """Returns the whole array for each device, if one dimension is split over all of them."""
    split = [index for index, word in enumerate(text.split()) if "[" in word]
    if len(split) != 1 or len({part.shape for part in column}) > 1:
        return column
    return [np.concatenate(column, split[0])] * len(column)
