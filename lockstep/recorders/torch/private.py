"""The names of PyTorch that are not public, and what the recorder needs them for.

Each is used here only. One that is missing in this version is an error with the version in one
line: what it does would not be seen.
"""

import functools
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.utils import stateless
from torch.utils import _pytree

from lockstep.recorders import common

_NAME = f"record_torch: PyTorch {torch.__version__}"
private = functools.partial(common.private, _NAME)
_attribute = functools.partial(common.attribute, _NAME)
_method = functools.partial(common.method, _NAME)
Targets = list[tuple[Any, str, Callable[..., Any]]]  # Owner, name, and what is called in its place.

tree_leaves, tree_map_only = (private(_pytree, x) for x in ("tree_leaves", "tree_map_only"))
with_buffers = private(stateless, "_reparametrize_module")  # In a `with` block, by their names.
_version = _attribute("_version")  # Of a tensor.
number_of = _method("_sequence_nr")  # Of a node of the graph: a later one has a larger number.
_transform = private(private(torch._C, "_functorch"), "peek_interpreter_stack")
values_of_sparse, indices_of_sparse = _method("_values"), _method("_indices")
weights_of_group, sharded_weight = _attribute("fsdp_params"), _attribute("sharded_param")
_mesh_info, _mesh = _attribute("mesh_info"), _attribute("mesh")
ENGINE = torch.autograd, "_engine_run_backward"  # What `backward` and `grad` call.
private(*ENGINE)


def version_of(weight: torch.Tensor) -> int:
    """Returns how often a tensor was changed in place."""
    return int(_version(weight))


def in_transform() -> bool:
    """Returns whether a function of `torch.func` computes, whose tensors have no numbers."""
    return _transform() is not None


def _has_sharding() -> bool:
    return common.numbers_of(str(torch.__version__)) >= (2, 8)


def check_sharded(what: str) -> None:
    """Raises ValueError if this PyTorch is too old for FSDP2 or pipelines."""
    text = f"model: {what} of PyTorch {torch.__version__}; needs 2.8 or newer"
    common.require(_has_sharding(), text)


def clipping(function: Callable[..., Any]) -> Targets:
    """Returns what clips gradients by a norm, however the public functions were imported."""
    return [(nn.utils.clip_grad, "_clip_grads_with_norm_", function)]


def of_pipelines(average: Callable[..., Any], inferring: Callable[..., Any]) -> Targets:
    """Returns what divides gradients, and what runs a stage to learn the shapes of its outputs."""
    module = sys.modules.get("torch.distributed.pipelining.stage")
    if module is None or not _has_sharding():
        return []
    base, stage = private(module, "_PipelineStageBase"), private(module, "PipelineStage")
    is_old = hasattr(stage, "_shape_inference")  # As in PyTorch 2.8.
    name = "_shape_inference" if is_old else "_forward_metadata_inference"
    return [(base, "scale_grads", average), (stage, name, inferring)]


def uncompiled(module: nn.Module) -> Any:
    """Returns the module in one of `torch.compile`, which has its weights; else the same."""
    return getattr(module, "_orig_mod", module)  # No other module has it.


def move_first(handle: Any) -> Any:
    """Moves a hook before the others; returns its handle."""
    hooks, own = private(handle, "hooks_dict_ref")(), private(handle, "id")
    others = {key: hook for key, hook in hooks.items() if key != own}
    for key in others:
        del hooks[key]
    hooks.update(others)
    return handle


def has_other_hooks(handle: Any) -> bool:
    """Returns whether other hooks are called at the place of one."""
    return len(private(handle, "hooks_dict_ref")()) > 1


def whole_weight(weight: Any) -> Any:
    """Returns the whole weight of one that `fully_shard` has split; None before its first use."""
    return getattr(weight, "_unsharded_param", None)


def fsdp_groups(module: nn.Module) -> list[Any]:
    """Returns the groups of weights that `fully_shard` has split."""
    owners = [owner for _, owner in module.named_modules() if hasattr(owner, "_get_fsdp_state")]
    groups: list[Any] = []
    for state in [owner._get_fsdp_state() for owner in owners]:
        several = getattr(state, "_fsdp_param_groups", None)  # Older versions have one group.
        groups += several or [private(state, "_fsdp_param_group")]
    return [group for group in groups if group is not None]


def is_split_by_deepspeed(weight: Any) -> bool:
    """Returns whether ZeRO of DeepSpeed keeps parts of a weight elsewhere."""
    return hasattr(weight, "_hp_mapping")


def mesh_of_group(group: Any) -> Any:
    """Returns the mesh over which `fully_shard` splits a group."""
    return _mesh(_mesh_info(group))


def root_mesh(mesh: Any) -> Any:
    """Returns the mesh of which a mesh is a part; itself if it is none, or not known."""
    return mesh._get_root_mesh() if hasattr(mesh, "_get_root_mesh") else mesh
