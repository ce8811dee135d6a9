"""The names of PyTorch that are not public, and what the recorder needs them for.

Each is used here only. One that is missing in this version is an error with the version in one
line: what it does would not be seen.
"""

import functools
import gc
import itertools
import sys
from collections.abc import Callable, Iterable, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.utils import _pytree
from torch.utils.data import dataloader

from lockstep.recorders import common

_NAME = f"record_torch: PyTorch {torch.__version__}"
private = functools.partial(common.private, _NAME)
_attribute = functools.partial(common.attribute, _NAME)
_method = functools.partial(common.method, _NAME)
Targets = list[tuple[Any, str, Callable[..., Any]]]  # Owner, name, and what is called in its place.

tree_leaves, tree_map_only = (private(_pytree, x) for x in ("tree_leaves", "tree_map_only"))
iterator_of_loaders = functools.partial(private, dataloader, "_BaseDataLoaderIter")
num_workers_of, seed_of_workers = _attribute("_num_workers"), _attribute("_base_seed")
buffers_of = _attribute("_buffers")  # Those of a module itself, in a form to replace them.
_version = _attribute("_version")  # Of a tensor.
number_of = _method("_sequence_nr")  # Of a node of the graph: a later one has a larger number.
_transform = private(private(torch._C, "_functorch"), "peek_interpreter_stack")
values_of_sparse, indices_of_sparse = _method("_values"), _method("_indices")
weights_of_group, sharded_weight = _attribute("fsdp_params"), _attribute("sharded_param")
_handle_of, _WRAPPED = _attribute("_handle"), "_fsdp_wrapped_module"
_mesh_info, _mesh = _attribute("mesh_info"), _attribute("mesh")
_fragment_of = _attribute("_hp_mapping")  # Of a weight in DeepSpeed: None if it is not here.
ENGINE = torch.autograd, "_engine_run_backward"  # What `backward` and `grad` call.
private(*ENGINE)


def version_of(weight: Any) -> int:
    """Returns how often a tensor was changed in place; 0 of a weight in a flat parameter."""
    return int(_version(weight)) if isinstance(weight, torch.Tensor) else 0


def in_transform() -> bool:
    """Returns whether a function of `torch.func` computes, whose tensors have no numbers."""
    return _transform() is not None


def _has_sharding() -> bool:
    return common.numbers_of(str(torch.__version__)) >= (2, 8)


def check_sharded(what: str) -> None:
    """Raises ValueError if this PyTorch is too old for FSDP2 or pipelines."""
    text = f"model: {what} of PyTorch {torch.__version__}; needs 2.8 or newer"
    common.require(_has_sharding(), text)


def flat_wrappers() -> tuple[type, ...]:
    """Returns the class that wraps modules in FSDP1, if the script can have it."""
    module = sys.modules.get("torch.distributed.fsdp")
    return (module.FullyShardedDataParallel,) if module else ()


def unwrapped(name: str) -> str:
    """Returns the name of a module or weight without those of wrappers of FSDP1."""
    return name.replace(f"{_WRAPPED}.", "").removesuffix(_WRAPPED).removesuffix(".")


class Range(NamedTuple):
    """The elements of a weight, from `start`, that a part of a flat parameter has at `offset`."""

    offset: int
    length: int
    start: int


class Flat:
    """A flat parameter of FSDP1: the weights in it, one after another.

    Args:
        wrapper: The wrapper that has it.
        prefix: Name of the wrapper in the model, which ends with a dot.

    Attributes:
        parameter: What autograd has, and an optimizer where `originals` is None.
        originals: For each weight, the tensor that an optimizer has; None without them.
        is_split: Whether each process has a part of it.
        names, shapes: Those of the weights.
        ranges: For each weight, what this process has of it; None for nothing.
        starts: For each weight, the place of its first element in the whole parameter.
        tied: Names of weights that have several.
        ranks: The processes that have the parts.
        reduced: The processes over which gradients are reduced: those, and of a hybrid the others.
    """

    def __init__(self, wrapper: Any, prefix: str) -> None:
        self._wrapper, self._handle = wrapper, _handle_of(wrapper)
        flat, own = self._handle.flat_param, functools.partial(private, self._handle.flat_param)
        self.parameter, self.originals = flat, own("_params")
        self.is_split: bool = private(self._handle, "uses_sharded_strategy")
        self.names = [unwrapped(f"{prefix}{name}") for name in own("_fqns")]
        self.shapes = [tuple(shape) for shape in own("_shapes")]
        common.require(all(own("_contiguities")), f"model: {self.names[0]}: must be contiguous")
        self.ranges = [
            Range(each.offset_in_shard, each.numel_in_shard, each.intra_param_start_idx)
            if each.in_shard else None
            for each in own("_shard_param_infos")
        ]  # fmt: skip
        sizes = [*zip(own("_numels_with_padding"), own("_is_padding_mask"), strict=True)]
        ends = itertools.accumulate(size for size, _ in sizes)
        pairs = zip(ends, sizes, strict=True)
        self.starts = [end - size for end, (size, is_padding) in pairs if not is_padding]
        self.tied = [
            [unwrapped(f"{prefix}{owner}.{name}") for owner, name in pair]
            for pair in (
                ((x.prim_module_name, x.prim_param_name), (x.module_name, x.param_name))
                for x in own("_shared_param_infos")
            )
        ]
        self.ranks = dist.get_process_group_ranks(private(self._handle, "process_group"))
        others = getattr(wrapper, "_inter_node_pg", None)  # Of hybrid strategies only.
        self.reduced = [self.ranks, *([dist.get_process_group_ranks(others)] if others else [])]

    @property
    def shard(self) -> Any:
        """The part that this process has, also while the whole parameter is put together."""
        return getattr(self.parameter, "_local_shard", self.parameter.data)  # Made at first use.

    @property
    def is_synchronised(self) -> bool:
        """Whether a backward pass reduces the gradients: it is not in `no_sync`."""
        return bool(private(self._wrapper, "_sync_gradients"))

    @property
    def has_split_gradient(self) -> bool:
        """Whether its gradient is that of the part."""
        gradient = self.parameter.grad
        return gradient is not None and gradient.shape == self.shard.shape

    @property
    def gathered(self) -> Any:
        """The whole parameter, if a forward pass without gradients has left it; else None."""
        if not self.is_split or private(self._handle, "is_sharded")(self.parameter):
            return None
        return self.parameter.data

    @property
    def mesh(self) -> Any:
        """All processes on axes: the mesh of the script, or one with its names."""
        if (own := getattr(self._wrapper, "_device_mesh", None)) is not None:
            return own
        return _mesh_of_size(dist.get_world_size(), len(self.ranks), len(self.reduced) > 1)


def _mesh_of_size(number: int, size: int, is_hybrid: bool = False) -> Any:
    """Returns all processes on one axis; of a hybrid on two, of which `size` share one copy."""
    shape, names = (
        ((number // size, size), ("replicate", "shard")) if is_hybrid else ((-1,), ("data",))
    )
    return SimpleNamespace(mesh=torch.arange(number).reshape(shape), mesh_dim_names=names)


class Partition:
    """A flat copy of weights in DeepSpeed's ZeRO, stages 1 and 2: the optimizer updates it.

    Each process has a range of the copy; after the update, all have the weights again.

    Args:
        owner: The optimizer of DeepSpeed, which has an optimizer of PyTorch.
        number: The number of its group of weights.

    The other attributes are those of `Flat`.

    Attributes:
        parameter: The tensor that the optimizer of PyTorch has: the range of this process.
        weights: The parameters of the model that the copy has, one after another.
    """

    originals = gathered = None
    is_split = is_synchronised = True
    starts, tied = list[int](), list[list[str]]()

    def __init__(self, owner: Any, number: int) -> None:
        self.parameter = private(owner, "single_partition_of_fp32_groups")[number]
        self.weights = [*private(owner, "bit16_groups")[number]]
        self.names = [""] * len(self.weights)
        self.shapes = [tuple(p.shape) for p in self.weights]
        self.ranges = [self._range_of(_fragment_of(p)) for p in self.weights]
        group = private(owner, "real_dp_process_group")[number]
        self.ranks = dist.get_process_group_ranks(group)
        self.reduced = [self.ranks]

    @staticmethod
    def _range_of(fragment: Any) -> Range | None:
        if fragment is None:
            return None
        own, of_weight = fragment.hp_fragment_address, fragment.lp_fragment_address
        return Range(own.start, own.numel, of_weight.start)

    @property
    def shard(self) -> Any:
        """The range of this process."""
        return self.parameter.data

    @property
    def has_split_gradient(self) -> bool:
        """Whether it has a gradient."""
        return self.parameter.grad is not None

    @property
    def mesh(self) -> Any:
        """All processes on one axis."""
        return _mesh_of_size(dist.get_world_size(), len(self.ranks))


def partitions_of(weights: Iterable[Any]) -> list[Partition]:
    """Returns the flat copies that DeepSpeed's ZeRO makes of weights."""
    module = sys.modules.get("deepspeed.runtime.zero.stage_1_and_2")
    own = {id(p) for p in weights if hasattr(p, "_hp_mapping")}
    if module is None or not own:
        return []
    kind = private(module, "DeepSpeedZeroOptimizer")
    owners = [each for each in gc.get_objects() if issubclass(type(each), kind)]
    found = [Partition(x, i) for x in owners for i in range(len(private(x, "bit16_groups")))]
    return [each for each in found if own.intersection(map(id, each.weights))]


def flat_parameters(module: nn.Module) -> list[Flat]:
    """Returns the flat parameters that wrappers of FSDP1 have in a model."""
    own = [(name, x) for name, x in module.named_modules() if isinstance(x, flat_wrappers())]
    pairs = ((f"{name}." if name else "", x) for name, x in own)
    return [Flat(x, prefix) for prefix, x in pairs if _handle_of(x) is not None]


def of_flat(clip: Callable[..., Any], scaler: Sequence[tuple[str, Callable[..., Any]]]) -> Targets:
    """Returns what clips gradients of FSDP1, and what scales its losses."""
    found: Targets = [(wrapper, "clip_grad_norm_", clip) for wrapper in flat_wrappers()]
    module = sys.modules.get("torch.distributed.fsdp.sharded_grad_scaler")
    own = module.ShardedGradScaler if module else None
    return found + [(own, name, each) for name, each in scaler if own and name in vars(own)]


def clipping(function: Callable[..., Any]) -> Targets:
    """Returns what clips gradients by a norm, however the public functions were imported."""
    return [(nn.utils.clip_grad, "_clip_grads_with_norm_", function)]


def of_pipelines(average: Callable[..., Any], inferring: Callable[..., Any]) -> Targets:
    """Returns what divides gradients, and what runs a stage to learn the shapes of its outputs."""
    module = sys.modules.get("torch.distributed.pipelining.stage")
    if module is None or not _has_sharding():
        return []
    base, stage = private(module, "_PipelineStageBase"), private(module, "PipelineStage")
    return [(base, "scale_grads", average), (stage, "_forward_metadata_inference", inferring)]


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


def mesh_of_group(group: Any) -> Any:
    """Returns the mesh over which `fully_shard` splits a group."""
    return _mesh(_mesh_info(group))


def root_mesh(mesh: Any) -> Any:
    """Returns the mesh of which a mesh is a part; itself if it is none, or not known."""
    return mesh._get_root_mesh() if hasattr(mesh, "_get_root_mesh") else mesh
