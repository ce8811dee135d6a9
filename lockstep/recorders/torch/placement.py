"""Knows the devices of all processes, and how the arrays of this one are parts of whole ones."""

import fnmatch
import functools
import itertools
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch.distributed as dist
from torch import Tensor

from lockstep.data.about import Fault
from lockstep.data.placement import Dimension, placement_from
from lockstep.data.placement import Placement as Placed
from lockstep.data.trace import OF_VARIABLES
from lockstep.recorders.common import require
from lockstep.recorders.torch.private import (
    check_sharded,
    fsdp_groups,
    mesh_of_group,
    root_mesh,
    sharded_weight,
    weights_of_group,
)
from lockstep.recorders.torch.values import is_dtensor
from lockstep.recorders.torch.variables import Variables

OF_ROWS = ("data", "y_pred", "y", "module_in", "module_out")  # And gradients by them.
OF_LOSS = ("raw", "added", "sums", "loss", "y_grad", "module_in_grad", "module_out_grad")
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


class Placement:
    """The devices of all processes, and the parts of arrays that this process has.

    Args:
        variables: The variables of the model.
        ddp: The model in DDP; None without it.
        mesh, dims: As those of `record`.
    """

    def __init__(self, variables: Variables, ddp: Any, mesh: Any, dims: Mapping[str, str]) -> None:
        self.variables, self.module = variables, variables.module
        groups = fsdp_groups(self.module)
        if groups:
            check_sharded("fully_shard")
        self.of_fsdp = {sharded_weight(p) for group in groups for p in weights_of_group(group)}
        group = ddp.process_group if ddp else None
        is_distributed = dist.is_available() and dist.is_initialized()
        self.rank = self.replica = dist.get_rank(group) if is_distributed else 0
        self.num_ranks = self.num_replicas = dist.get_world_size(group) if is_distributed else 1
        meshes, weights = [mesh_of_group(each) for each in groups], variables.weights.values()
        self.mesh = mesh_of(mesh, meshes, weights) if is_distributed else None  # If parts exist.
        self.sizes, self.at = (self.mesh.sizes, self.mesh.at) if self.mesh else ({}, {})
        self.placements: dict[str, str] = {}  # "KIND/INDEX" → how an array is part of a whole one.
        self.texts: dict[str, str] = {}  # The same of weights and state, by patterns of `dims`.
        self.dims: dict[str, list[Dimension]] = {"inputs": [], "outputs": []}
        self.is_first = self.is_last = True  # Stages of a pipeline that this process has.
        self.knows_loss = True  # Whether it is known how the losses of processes are added.
        self.row_sizes: Sequence[int] = ()  # The shape of the first input.
        self.num_parts = 1  # Parts of a sequence, whose loss is the mean of their losses.
        if self.mesh is None:
            require(self.num_ranks == 1 or not any(dims.values()), "dims: needs mesh=")
            return
        along = [each.mesh.flatten().tolist() for each in meshes]
        along += [dist.get_process_group_ranks(group)] if ddp else []
        self._name_axes(self.mesh, along, dims)

    def _name_axes(
        self, mesh: Mesh, along: Sequence[Sequence[int]], dims: Mapping[str, str]
    ) -> None:
        """Finds the kinds of the axes, and how plain weights are split over them."""
        self.rank, self.num_ranks = mesh.rank, mesh.ranks.size
        axes = [mesh.axes_of(ranks) for ranks in along]
        require(None not in axes, "mesh: has no axes over which the model is reduced; pass it")
        reduced = {axis for each in axes for axis in each or ()}
        own: dict[str, Any] = {**dict(self.module.named_buffers()), **self.variables.weights}
        for pattern, text in dims.items():
            try:
                found = [*placement_from(text, self.sizes).dimensions]
            except Fault as fault:
                raise ValueError(f"dims {fault}") from None
            if pattern in self.dims:
                self.dims[pattern] = found
                continue
            self.texts[pattern] = text
            for name in fnmatch.filter(own, pattern):
                require(len(found) == own[name].dim(), f"dims: {text!r} is not that of {name}")
        mesh.name_axes(reduced, self.dims["inputs"])
        if mesh.stages:
            check_sharded("pipelines")
        # State has a name with "/", and may not exist yet.
        idle = [p for p in self.texts if "/" not in p and not fnmatch.filter(own, p)]
        is_known = not idle or mesh.stages  # Another stage may have them.
        require(is_known, f"dims: no weight has a name like {', '.join(idle)}")
        self.replica, self.num_replicas = mesh.place(mesh.data)
        stage, num_stages = mesh.place(mesh.stages)
        self.is_first, self.is_last = stage == 0, stage == num_stages - 1
        self.num_parts = mesh.place(mesh.sequence)[1]
        self.knows_loss = reduced.issuperset(mesh.sequence)

    def given(self, name: str, slot: str = "", *, is_like: bool = True) -> str:
        """Returns what `dims` says of a weight or a statistic; "" for nothing.

        Of a slot of its state, it is what `dims` says of "NAME/SLOT", else of the weight if the
        array `is_like` the weight.
        """
        full = f"{name}/{slot}" if slot else name
        found = (
            text for pattern, text in self.texts.items()
            if ("/" in pattern) == bool(slot) and fnmatch.fnmatchcase(full, pattern)
        )  # fmt: skip
        return next(found, self.given(name) if slot and is_like else "")

    def asked(self, name: str, own: Sequence[int], whole: Sequence[int]) -> str:
        """Returns how to say that a variable is a part of a larger one; "" if it cannot be one."""
        split = [number < n for number, n in zip(own, whole, strict=False)]
        if len(own) != len(whole) or not any(split):
            return ""
        axes = [*self.mesh.model, *self.sizes] if self.mesh else ["tp"]
        words = [f"d{k}[{axes[0]}]" if is_split else f"d{k}" for k, is_split in enumerate(split)]
        how = "" if self.mesh else "mesh= and "
        given = f"{how}dims={{{name!r}: {' '.join(words)!r}}}"
        return f"{name} is {tuple(own)}, and {tuple(whole)} there; if it is a part, pass {given}"

    def own_part(self, text: str, value: Tensor, whole: np.ndarray) -> np.ndarray:
        """Returns this process' part of an array; all of it for a DTensor, which is split later."""
        placement = placement_from(text, self.sizes)
        if is_dtensor(value) or len(placement.dimensions) != whole.ndim:
            return whole
        found = placement.places(whole.shape, self.sizes, self.at)
        return whole if found is None else whole[np.ix_(*found)]

    def place(self, kind: str, index: Any, value: Tensor) -> Placed | None:
        """Notes and returns how an array is part of the whole one; None if this is not known."""
        text = self.text_of(kind, index, value)
        self.placements.pop(f"{kind}/{index}", None)
        self.placements |= {f"{kind}/{index}": text} if text else {}
        return None if text is None else placement_from(text, self.sizes)

    def text_of(self, kind: str, index: Any, value: Tensor) -> str | None:
        """Returns how an array is part of the whole one; "" for all of it, None if not known."""
        if not self.mesh:
            return ""
        is_here = self.is_first if kind == "data" else self.is_last
        if kind in ("data", "y_pred", "y_grad", "loss") and not is_here:
            return None
        if kind in OF_LOSS and not self.knows_loss:  # It is not known how losses are added.
            return None
        text: str | None = ""
        if is_dtensor(value):
            text = self.mesh.text_of(value)
        elif kind.removesuffix("_grad") in OF_ROWS:
            text = self._text_of_rows(kind, value)
        elif self.texts and kind in OF_VARIABLES:
            variable = [*self.variables.described.values()][index]
            name = variable.get("of", variable["name"])
            is_like = "of" in variable and value.shape == self.variables.weights[name].shape
            text = self.given(name, variable.get("slot", ""), is_like=is_like)
        elif self.texts and kind in ("raw", "added", "sums", "unclipped", "clipped"):
            names = [*self.variables.weights]
            text = self.given(names[index % len(names)])
        if kind in ("raw", "added", "loss") and self.num_parts > 1 and text is not None:
            text = text or " ".join(f"d{k}" for k in range(value.dim()))
            text = f"{text} mean({','.join(self.mesh.sequence)})".strip()
        return text

    def _text_of_rows(self, kind: str, value: Tensor) -> str:
        """Returns how inputs or outputs are split: like the first input in dimensions as long."""
        left = [*zip(self.dims["inputs"], self.row_sizes, strict=False)]
        outputs = self.dims["outputs"]
        if kind[:2] == "y_" and len(outputs) == value.dim():
            return " ".join(each.text for each in outputs)
        found = []
        for k, size in enumerate(value.shape if left else ()):
            same = next((each for each in left if each[1] == size), None)
            left = [each for each in left if each is not same]
            found.append(same[0].text if same else f"d{k}")
        return " ".join(found)


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
