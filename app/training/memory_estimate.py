"""How much memory a training takes, and what to say when there is not enough."""

import math
from collections.abc import Iterable
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from app.config import TrainConfig
from app.config.split_numbers import (
    has_option,
    num_replicas,
    share_of_batch_alive,
)
from app.runtime import console
from app.runtime.errors import DeviceError
from app.training.tensor_lifetimes import LiveTensors, live_tensors_in_step
from strategies.tf_private import flatten_layers, has_symbolic_output

# What TensorFlow's kernels work with, and allocators round up, as seen on CPUs: LeNet with batches
# of 256 and 4,096 took 1 % more or less than these say, ResNet-18 with 64 and 256 up to 16 % more.
_WORK_BYTES, _WORK_SHARE = 16 << 20, 1.12
# Only what is surely too much is refused: the estimate may be off by as much.
_ACCURACY = 0.8


class StepSize(NamedTuple):
    """The size of a training step.

    Attributes:
        num_copies: copies of the weights at the same time, gathered ones included.
        num_replicas: parts of the global batch whose gradients are computed at the same time.
        global_batch_size: examples of a step over all replicas.
        num_states: copies of the optimizer state; None for as many as of the weights.
        share_alive: share of the batch whose activations are there at the same time.
    """

    num_copies: int
    num_replicas: int
    global_batch_size: int
    num_states: int | None = None
    share_alive: float = 1.0

    @classmethod
    def of(cls, config: TrainConfig, num_devices: int, global_batch_size: int) -> "StepSize":
        """Returns the size of a step of a training.

        Args:
            config: of the training.
            num_devices: of all workers.
            global_batch_size: of its largest batch.
        """
        split = config.strategy, config, num_devices
        replicas = num_replicas(*split)
        is_sharded = has_option(config.strategy, "shard")
        return cls(
            # Replicas that keep a part of the weights hold all of them besides in a step.
            num_copies=replicas + (is_sharded and replicas > 1),
            num_replicas=replicas,
            global_batch_size=global_batch_size,
            num_states=1 if is_sharded else replicas,
            share_alive=share_of_batch_alive(*split),
        )


class MemoryEstimate(NamedTuple):
    """What the training of a replica takes beside the program itself.

    Attributes:
        weights_bytes: of the model.
        optimizer_state_bytes: what the optimizer keeps, its momentum.
        step_bytes: in a step, whatever the shard: gradients, and what kernels work with.
        image_bytes: in a step, for each image of the shard: activations and their gradients.
    """

    weights_bytes: int
    optimizer_state_bytes: int
    step_bytes: float
    image_bytes: float

    @classmethod
    def of(cls, model: keras.Model, optimizer_variables: Iterable[Any] = ()) -> "MemoryEstimate":
        """Estimates from the graph of a step, which takes a second or two for a deep model.

        Args:
            model: the whole model.
            optimizer_variables: of the whole model, or what stands for them where they are split.
        """
        alive = live_tensors_in_step(model)
        return cls(
            _size_bytes(model.variables),
            _size_bytes(optimizer_variables),
            *with_work(alive),
        )

    def total_bytes(self, size: StepSize) -> float:
        """Returns the bytes of all copies of the weights and all examples together."""
        num_alive = size.share_alive * size.global_batch_size
        return self.fixed_bytes(size) + num_alive * self.image_bytes

    def fixed_bytes(self, size: StepSize) -> float:
        """Returns the bytes that do not depend on the number of examples."""
        num_states = size.num_copies if size.num_states is None else size.num_states
        weights_bytes = size.num_copies * self.weights_bytes
        state_bytes = num_states * self.optimizer_state_bytes
        return weights_bytes + state_bytes + size.num_replicas * self.step_bytes


def with_work(alive: LiveTensors) -> tuple[float, float]:
    """Returns the bytes of a step, fixed and of each image, with what kernels work with."""
    return _WORK_BYTES + _WORK_SHARE * alive.fixed_bytes, _WORK_SHARE * alive.image_bytes


def _size_bytes(variables: Iterable[Any]) -> int:
    """Returns the bytes of variables, or of what stands for them: all have a shape and a dtype."""
    return sum(math.prod(v.shape) * tf.as_dtype(v.dtype).size for v in variables)


def _upper_bound(model: keras.Model, size: StepSize) -> float:
    """Returns more than any step can take: all that layers compute at once, with its gradients.

    Infinity where layers are made of layers: what these compute is not to be seen from outside.
    """
    layers = [
        layer
        for layer in flatten_layers(model)
        if not isinstance(layer, keras.Model | keras.layers.InputLayer)
    ]
    if not all(has_symbolic_output(layer) for layer in layers):
        return math.inf
    outputs = [tensor for layer in layers for tensor in keras.tree.flatten(layer.output)]
    computed = sum(int(np.prod(tensor.shape[1:])) for tensor in outputs)
    copies = 4 * max(size.num_copies, size.num_replicas) * _size_bytes(model.variables)
    return size.num_replicas * _WORK_BYTES + copies + 2 * 4 * size.global_batch_size * computed


def check_memory(
    model: keras.Model,
    optimizer_variables: Iterable[Any],
    size: StepSize,
    *,
    available: int | None,
) -> None:
    """Refuses a batch that cannot fit into main memory, which all logical CPU devices share.

    Args:
        model: the whole model.
        optimizer_variables: see `MemoryEstimate.of`.
        size: of a step; all of it shares the memory.
        available: bytes; None where nobody knows.

    Raises:
        DeviceError: a step takes more than there is.
    """
    if available is None or _upper_bound(model, size) <= available:
        return
    needed = MemoryEstimate.of(model, optimizer_variables).total_bytes(size)
    if _ACCURACY * needed > available:
        raise too_large(model, optimizer_variables, size, available=available)


def too_large(
    model: keras.Model,
    optimizer_variables: Iterable[Any],
    size: StepSize,
    *,
    available: int | None,
) -> DeviceError:
    """Returns what to raise where a batch does not fit, or did not.

    Args:
        model, optimizer_variables, size: see `check_memory`.
        available: likewise; None where the memory is that of GPUs.
    """
    estimate = MemoryEstimate.of(model, optimizer_variables)
    needed = estimate.total_bytes(size)
    there = f", {available / 2**30:.1f} are free" if available is not None else ""
    per_replica = f"{-(-size.global_batch_size // size.num_replicas):,} images"
    return DeviceError(
        f"out of memory: --global_batch_size={size.global_batch_size}, which is"
        f" {per_replica} on each of {console.count(size.num_replicas, 'replica')}, takes an"
        f" estimated {needed / 2**30:.1f} GiB{there}; {_advice(estimate, size, available)}"
    )


def _advice(estimate: MemoryEstimate, size: StepSize, available: int | None) -> str:
    """Says which batch to use instead, where one can fit at all."""
    fits = size.global_batch_size // 2
    if available is not None:
        room = available - estimate.fixed_bytes(size)
        fits = min(fits, int(room // (size.share_alive * estimate.image_bytes)))
    fits = fits // size.num_replicas * size.num_replicas
    if fits < size.num_replicas:
        return "not even one image for each replica fits, use fewer devices or another machine"
    what = "by the same estimate the largest that fits" if available is not None else "half of it"
    return f"use --global_batch_size={fits}, {what}, or less"
