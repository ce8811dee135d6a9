"""How much memory a training takes, and what to say when there is not enough."""

import contextlib
import pathlib
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from app import console
from app.errors import DeviceError

if TYPE_CHECKING:
    import keras  # With it comes TensorFlow.

# How much of all that a forward pass computes is there at once, as seen on CPUs: half of it for
# ResNet-18, where kernels work in place, and 1.6 times for LeNet, with its gradients and images.
_LOW, _HIGH = 0.5, 1.6
# Each replica holds its weights, their gradients and the optimizer's momentum, all float32.
_COPIES = 3


class MemoryEstimate(NamedTuple):
    """What a training takes beside the program itself.

    Attributes:
        fixed_bytes: of each replica: weights, gradients, momentum.
        low_bytes: for an example of the batch, at least.
        high_bytes: for an example of the batch, at most.
    """

    fixed_bytes: int
    low_bytes: int
    high_bytes: int

    @classmethod
    def of(cls, model: "keras.Model") -> "MemoryEstimate":
        """Estimates from the shapes of a model's layers."""
        import keras

        itemsize = 4 if keras.config.dtype_policy().compute_dtype == "float32" else 2
        computed_bytes = itemsize * _num_computed(model)
        return cls(
            4 * _COPIES * model.count_params(),
            round(_LOW * computed_bytes),
            round(_HIGH * computed_bytes),
        )


def _num_computed(model: "keras.Model") -> int:
    """Returns how many numbers the layers of a model compute for one example."""
    import keras

    outputs = [
        tensor
        for layer in model._flatten_layers(include_self=False)
        if not isinstance(layer, keras.Model | keras.layers.InputLayer)
        for tensor in keras.tree.flatten(layer.output)
    ]
    return sum(int(np.prod(tensor.shape[1:])) for tensor in outputs)


def available_bytes() -> int | None:
    """Returns how much main memory this process can still get, None where that is unknown."""
    found = []
    with contextlib.suppress(OSError, KeyError, ValueError):
        free = _fields("/proc/meminfo")
        found.append(1024 * (free["MemAvailable:"] + free["SwapFree:"]))
    group = "/sys/fs/cgroup"  # A container's own limit; "max", which is no number, without one.
    with contextlib.suppress(OSError, KeyError, ValueError):
        limit, used = (int(_read(f"{group}/{name}")) for name in ("memory.max", "memory.current"))
        pages = _fields(f"{group}/memory.stat")
        # Of what counts as used, pages of files can be had back.
        found.append(limit - used + pages["inactive_file"] + pages["active_file"])
    return min(found, default=None)


def _fields(path: str) -> dict[str, int]:
    """Reads lines of a name and a number, with or without a unit."""
    return {words[0]: int(words[1]) for words in map(str.split, _read(path).splitlines())}


def _read(path: str) -> str:
    return pathlib.Path(path).read_text(encoding="utf-8")


def check_memory(
    model: "keras.Model", *, num_replicas: int, global_batch_size: int, available: int | None
) -> None:
    """Refuses a batch that cannot fit into main memory, which all logical CPU devices share.

    Args:
        model: of one replica.
        num_replicas: how many share the memory.
        global_batch_size: examples of a step over all of them.
        available: bytes; None where nobody knows.

    Raises:
        DeviceError: even the lowest estimate is above what there is.
    """
    estimate = MemoryEstimate.of(model)
    needed = num_replicas * estimate.fixed_bytes + global_batch_size * estimate.low_bytes
    if available is not None and needed > available:
        raise too_large(
            model,
            num_replicas=num_replicas,
            global_batch_size=global_batch_size,
            available=available,
        )


def too_large(
    model: "keras.Model", *, num_replicas: int, global_batch_size: int, available: int | None
) -> DeviceError:
    """Returns what to raise where a batch does not fit, or did not.

    Args:
        model, num_replicas, global_batch_size, available: see `check_memory`; `available` is None
            where the memory is that of GPUs.
    """
    estimate = MemoryEstimate.of(model)
    fixed_bytes = num_replicas * estimate.fixed_bytes
    low, high = (
        (fixed_bytes + global_batch_size * size) / 2**30
        for size in (estimate.low_bytes, estimate.high_bytes)
    )
    there = f", {available / 2**30:.1f} are free" if available is not None else ""
    per_replica = f"{-(-global_batch_size // num_replicas):,} images"
    return DeviceError(
        f"out of memory: --global_batch_size={global_batch_size}, which is {per_replica} on each of"
        f" {console.count(num_replicas, 'replica')}, takes {low:.1f} to {high:.1f} GiB by"
        f" estimate{there} — memory for a step is required;"
        f" {_advice(estimate, num_replicas, global_batch_size, available)}"
    )


def _advice(
    estimate: MemoryEstimate, num_replicas: int, global_batch_size: int, available: int | None
) -> str:
    """Says which batch to use instead, where one can fit at all."""
    fits, known = global_batch_size // 2, available is not None
    if known:
        room = available - num_replicas * estimate.fixed_bytes
        fits = min(fits, room // estimate.high_bytes)
    fits = fits // num_replicas * num_replicas
    if fits < num_replicas:
        return "not even one image for each replica fits, use fewer devices or another machine"
    what = "by the same estimate the largest that fits" if known else "half of it"
    return f"use --global_batch_size={fits}, {what}, or less"
