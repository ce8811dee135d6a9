"""Knows how the arrays of this process are parts of whole ones."""

import fnmatch
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
from lockstep.recorders.torch.layout import Mesh, mesh_of
from lockstep.recorders.torch.private import (
    check_sharded,
    fsdp_groups,
    mesh_of_group,
    sharded_weight,
    weights_of_group,
)
from lockstep.recorders.torch.values import is_dtensor
from lockstep.recorders.torch.variables import Variables

OF_ROWS = ("data", "y_pred", "y", "module_in", "module_out")  # And gradients by them.
OF_LOSS = ("raw", "added", "sums", "loss", "y_grad", "module_in_grad", "module_out_grad")


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
