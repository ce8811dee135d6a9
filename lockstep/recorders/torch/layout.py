"""The devices of a training on named axes, and how they split arrays."""

import functools
import itertools
import re
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch.distributed as dist

from lockstep.data.placement import Dimension
from lockstep.recorders.common import require
from lockstep.recorders.torch.private import root_mesh
from lockstep.recorders.torch.values import is_dtensor

DATA, STAGES = (  # Names of axes that split the batch, and the layers of a pipeline.
    re.compile("(dp|data|fsdp|ddp|hsdp|replicate|shard|batch)", re.IGNORECASE),
    re.compile("(pp|pipe|stage)", re.IGNORECASE),
)


class Mesh:
    """The devices on named axes, and the place of this process among them.

    Args:
        mesh: A `DeviceMesh` of all processes.
        default: The name of its axis, if it has a single one without a name.
    """

    def __init__(self, mesh: Any, default: str) -> None:
        self.ranks = np.array(mesh.mesh)  # The processes, as `torch.distributed` numbers them.
        names = mesh.mesh_dim_names or [default] * (self.ranks.ndim == 1)
        names = names or [f"axis{i}" for i in range(self.ranks.ndim)]
        names = [re.sub(r"\W", "_", name) for name in names]
        place = np.argwhere(self.ranks == dist.get_rank())
        require(len(place), "mesh: does not have this process")
        # Name of an axis → number of devices along it, and the position of this process.
        self.sizes = dict(zip(names, self.ranks.shape, strict=True))
        self.at = dict(zip(names, place[0].tolist(), strict=True))
        self.rank = self.place(names)[0]  # The row-major position of this process.
        # The axes that split the examples, other dimensions of the inputs, the layers of a
        # pipeline, and weights only.
        self.data, self.sequence, self.stages, self.model = (list[str]() for _ in range(4))
        self._text = functools.cache(self._text_of)

    def name_axes(self, reduced: set[str], inputs: Sequence[Dimension]) -> None:
        """Finds the kinds of the axes.

        Args:
            reduced: Those over which DDP or FSDP2 reduces gradients.
            inputs: The dimensions of the inputs; the first are the examples. What a user says of
                them counts more than `reduced`: a model may split sequences that ranks share.
        """
        long = [axis for axis, size in self.sizes.items() if size > 1]
        split = {axis for each in inputs[1:] for axis in each.axes}
        data = {axis for each in inputs[:1] for axis in each.axes} or reduced
        data = data or {axis for axis in self.sizes if DATA.match(axis)}
        self.data = [axis for axis in self.sizes if axis in data - split]
        self.sequence = [axis for axis in long if axis in split]
        self.stages = [axis for axis in long if STAGES.match(axis) and axis not in self.data]
        known = {*self.data, *self.sequence, *self.stages}
        self.model = [axis for axis in long if axis not in known]

    def place(self, axes: Sequence[str]) -> tuple[int, int]:
        """Returns the row-major position of this process along axes, and the number of them."""
        found, number = 0, 1
        for axis in axes:
            found, number = found * self.sizes[axis] + self.at[axis], number * self.sizes[axis]
        return found, number

    def axes_of(self, ranks: Sequence[int]) -> tuple[str, ...] | None:
        """Returns the axes along which these processes are, of which this one is one."""
        long = [axis for axis, size in self.sizes.items() if size > 1]
        for number in range(len(long) + 1):
            for axes in itertools.combinations(long, number):
                along = (slice(None) if axis in axes else i for axis, i in self.at.items())
                if self.ranks[tuple(along)].flatten().tolist() == [*ranks]:
                    return axes
        return None

    def text_of(self, value: Any) -> str | None:
        """Returns how the local part of a DTensor is part of it; None if there is no text."""
        return self._text(value.device_mesh, tuple(value.placements), value.dim())

    def _text_of(self, mesh: Any, placements: Sequence[Any], ndim: int) -> str | None:
        ranks = np.array(mesh.mesh)
        (place,) = np.argwhere(ranks == dist.get_rank())
        split: list[list[tuple[str, int]]] = [[] for _ in range(ndim)]  # Text and size of axes.
        sums = ""
        for i, placement in reversed([*enumerate(placements)]):
            along = (slice(None) if i == k else at for k, at in enumerate(place))
            axes = self.axes_of(ranks[tuple(along)].tolist())
            if axes is None:
                return None
            if axes and hasattr(placement, "dim"):
                own, number, factor = split[placement.dim], 0, getattr(placement, "split_factor", 1)
                while factor > 1 and number < len(own):  # FSDP2 splits what others have split.
                    number, factor = number + 1, factor // own[number][1]
                if factor != 1:
                    return None
                own.insert(number, (",".join(axes), ranks.shape[i]))
            elif axes and (name := getattr(placement, "reduce_op", "")):
                if name not in ("sum", "avg") or type(placement).__name__ != "Partial":
                    return None
                sums += f" {'sum' if name == 'sum' else 'mean'}({','.join(axes)})"
        if not (sums or any(split)):
            return ""
        texts = (f"[{','.join(text for text, _ in own)}]" if own else "" for own in split)
        return " ".join(f"d{k}{text}" for k, text in enumerate(texts)) + sums


def mesh_of(mesh: Any, meshes: Sequence[Any], weights: Any) -> Mesh | None:
    """Returns the devices of all processes; None if the weights are not split."""
    found = [p.device_mesh for p in weights if is_dtensor(p)]
    found = [mesh] if mesh is not None else [*found, *meshes]
    roots = [root_mesh(x) for x in found]
    root, number = max(roots, key=lambda x: x.mesh.numel(), default=None), dist.get_world_size()
    if root is None or root.mesh.numel() == number == 1:
        return None
    what = f"mesh: has {root.mesh.numel()} of {number} processes"
    require(root.mesh.numel() == number, f"{what}; pass a mesh of all, of which others are parts")
    return Mesh(root, "data" if meshes else "axis0")
