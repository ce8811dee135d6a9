"""Tensors as arrays, states of random numbers, and the settings of optimizers and layers."""

import dataclasses
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lockstep.recorders.torch.private import tree_leaves, tree_map_only

NAMES = {
    **{"lr": "learning_rate", "eps": "epsilon", "alpha": "rho", "stride": "strides", "p": "rate"},
    "adjust_lr_fn": "rate_of_shape",
}
OF_LAYERS = (
    *("eps", "momentum", "stride", "padding", "dilation", "groups", "p"),
    "scale_grad_by_freq",
)


def to_array(value: Tensor, *, copy: bool = True) -> np.ndarray:
    """Returns the elements in the memory of the host; bfloat16 as float32, complex ones as pairs.

    Args:
        value: A tensor.
        copy: Whether to copy them; otherwise the array may share the memory of the tensor.
    """
    value = local(value)
    value = torch.view_as_real(value.resolve_conj()) if value.is_complex() else value
    dense = value if value.layout == torch.strided else value.to_dense()
    dense = dense.float() if dense.dtype == torch.bfloat16 else dense  # NumPy does not have it.
    array = np.asarray(dense.detach().cpu())
    is_shared = dense is value and value.device.type == "cpu"
    return np.array(array) if copy and is_shared else array


def is_dtensor(value: Any) -> bool:
    """Returns whether a tensor is split over processes."""
    return hasattr(value, "full_tensor")


def local(value: Any) -> Any:
    """Returns the part of a DTensor that this process has."""
    return value.detach().to_local() if is_dtensor(value) else value


def assign(target: Any, array: np.ndarray) -> Any:
    """Assigns an array to a tensor, which may be split over processes; returns the tensor."""
    value: Any = torch.tensor(array)
    if is_dtensor(target):
        shard = dist.tensor.distribute_tensor
        value = shard(value, target.device_mesh, target.placements, src_data_rank=None)
    return target.copy_(value)


class Hook:
    """A hook of a module, which does nothing in a copy of the module, or in a saved one."""

    def __init__(self, call: Callable[..., Any]) -> None:
        self.call = call

    def __call__(self, *args: Any) -> Any:
        """Calls what the hook is for."""
        return self.call(*args)

    def __reduce__(self) -> tuple[Any, ...]:
        return Hook, (_nothing,)


def _nothing(*_: Any) -> None:
    pass


def take(nest: Any, rows: Tensor, size: int) -> Any:
    """Returns a nest of tensors, with these rows of the batches, which have `size` examples.

    What is saved for the backward pass is kept from the script's own hooks, which may change it.
    """
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x):
        return tree_map_only(Tensor, lambda x: x[rows] if x.shape[:1] == (size,) else x, nest)


def floating(nest: Any) -> list[Tensor]:
    """Returns the floating-point tensors of inputs or outputs of a module."""
    nests = [vars(x) if dataclasses.is_dataclass(x) else x for x in tree_leaves(nest)]
    tensors = [x for x in tree_leaves(nests) if isinstance(x, Tensor)]
    return [x for x in tensors if x.is_floating_point()]


def with_rows(output: Any, count: int) -> list[Tensor]:
    """Returns the floating-point tensors of an output that have a row for each example."""
    return [x for x in floating(output) if x.dim() and len(local(x)) == count]


def computed_in(output: Any, weights: Mapping[str, Tensor]) -> str:
    """Returns the dtype to which a forward pass rounds: that of autocast, of its outputs, or TF32.

    It is "" if the forward pass computes in float32.
    """
    dtypes = [x.dtype for x in tree_leaves(output) if isinstance(x, Tensor)]
    for device in {p.device.type for p in weights.values()}:
        if torch.is_autocast_enabled(device):
            dtypes.append(torch.get_autocast_dtype(device))
    names = (str(dtype).removeprefix("torch.") for dtype in dtypes)
    short = next((name for name in names if name in ("bfloat16", "float16")), "")
    return short or ("tensorfloat32" if rounds_to_tf32(weights) else "")


def rounds_to_tf32(weights: Mapping[str, Tensor]) -> bool:
    """Returns whether a GPU rounds float32 to 10 bits in matrix products, or in convolutions."""
    on_gpu = [p for p in weights.values() if p.is_cuda and p.dtype == torch.float32]
    if not on_gpu or os.environ.get("NVIDIA_TF32_OVERRIDE") == "0":
        return False
    convolves = any(p.dim() > 2 for p in on_gpu)
    return _allows_tf32(torch.backends.cuda.matmul) or (
        convolves and _allows_tf32(torch.backends.cudnn, torch.backends.cudnn.conv)
    )


def _allows_tf32(*settings: Any) -> bool:
    """Returns whether the settings of an operation allow TF32; the last is the most exact."""
    try:
        return bool(settings[0].allow_tf32)
    except RuntimeError:  # A script has set `fp32_precision`, of PyTorch 2.9, in its place.
        return settings[-1].fp32_precision == "tf32"


def random_states() -> list[Tensor]:
    """Returns the state of the generator of the CPU, and of the GPU if it is used."""
    on_gpu = [torch.cuda.get_rng_state()] if torch.cuda.is_initialized() else []
    return [torch.get_rng_state(), *on_gpu]


def set_random_states(states: Sequence[Tensor]) -> None:
    """Restores what `random_states` has returned."""
    restore = (torch.set_rng_state, torch.cuda.set_rng_state)[: 1 + torch.cuda.is_initialized()]
    for set_state, state in zip(restore, states, strict=False):
        set_state(state)


def settings_of(options: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the settings of an optimizer that are plain values."""
    lists = (("beta", "betas"), ("ns", "ns_coefficients"))
    single = {f"{x}_{i}": v for x, name in lists for i, v in enumerate(options.get(name, ()), 1)}
    plain = {NAMES.get(name, name): value for name, value in {**options, **single}.items()}
    plain = {k: v.tolist() if isinstance(v, Tensor) else v for k, v in plain.items()}
    return {k: v for k, v in plain.items() if isinstance(v, bool | int | float | str)}


def layers_of(modules: Iterable[tuple[str, nn.Module]]) -> list[dict[str, Any]]:
    """Returns class, weights and settings of the layers, given with their names, that have some."""
    layers = []
    for name, layer in modules:
        settings = {NAMES.get(x, x): getattr(layer, x) for x in OF_LAYERS if hasattr(layer, x)}
        # A layer in it, a weight or a process group may have the name of a setting.
        settings = {x: value for x, value in settings.items() if _is_plain(value)}
        own = [*layer.named_parameters(recurse=False), *layer.named_buffers(recurse=False)]
        names = [f"{name}.{x}" if name else x for x, _ in own]
        if settings or names:
            kind = {"name": name, "class": type(layer).__name__, "weights": names}
            layers.append(kind | settings)
    return layers


def _is_plain(value: Any) -> bool:
    if isinstance(value, tuple | list):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, bool | int | float | str)
