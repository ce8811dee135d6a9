"""Estimates the memory of a training, and rejects batches that do not fit."""

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

# Factors for workspace of kernels and rounding of allocators, measured on CPUs: LeNet with batches
# of 256 and 4,096 was within 1 % of the estimate, ResNet-18 with 64 and 256 up to 16 % above.
_WORK_BYTES, _WORK_SHARE = 16 << 20, 1.12
# Reject only what certainly does not fit: the estimate may be off by this factor.
_ACCURACY = 0.8


class StepSize(NamedTuple):
    """The size of a training step.

    Attributes:
        num_copies: copies of the weights in memory at the same time, including gathered ones.
        num_replicas: parts of the global batch whose gradients are computed in parallel.
        global_batch_size: examples per step over all replicas.
        num_states: copies of the optimizer state; None for as many as of the weights.
        share_alive: fraction of the batch whose activations are in memory at the same time.
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
            config: options of the training.
            num_devices: devices of all workers.
            global_batch_size: size of its largest batch.
        """
        split = config.strategy, config, num_devices
        replicas = num_replicas(*split)
        is_sharded = has_option(config.strategy, "shard")
        return cls(
            # Replicas that keep a part of the weights also hold all of them during a step.
            num_copies=replicas + (is_sharded and replicas > 1),
            num_replicas=replicas,
            global_batch_size=global_batch_size,
            num_states=1 if is_sharded else replicas,
            share_alive=share_of_batch_alive(*split),
        )


class MemoryEstimate(NamedTuple):
    """The memory of a replica's training, in addition to the program itself.

    Attributes:
        weights_bytes: bytes of the model.
        optimizer_state_bytes: bytes of the optimizer state.
        step_bytes: bytes of a step independent of the shard: gradients, and workspace of kernels.
        image_bytes: bytes of a step per image of the shard: activations and their gradients.
    """

    weights_bytes: int
    optimizer_state_bytes: int
    step_bytes: float
    image_bytes: float

    @classmethod
    def of(cls, model: keras.Model, optimizer_variables: Iterable[Any] = ()) -> "MemoryEstimate":
        """Estimates the memory from the graph of a step; takes 1 to 2 s for a deep model.

        Args:
            model: the unsplit model.
            optimizer_variables: variables of the optimizer, or unsplit views of them.
        """
        alive = live_tensors_in_step(model)
        return cls(
            _size_bytes(model.variables),
            _size_bytes(optimizer_variables),
            *with_work(alive),
        )

    def total_bytes(self, size: StepSize) -> float:
        """Returns the bytes of all copies of the weights and of all examples."""
        num_alive = size.share_alive * size.global_batch_size
        return self.fixed_bytes(size) + num_alive * self.image_bytes

    def fixed_bytes(self, size: StepSize) -> float:
        """Returns the bytes that are independent of the number of examples."""
        num_states = size.num_copies if size.num_states is None else size.num_states
        weights_bytes = size.num_copies * self.weights_bytes
        state_bytes = num_states * self.optimizer_state_bytes
        return weights_bytes + state_bytes + size.num_replicas * self.step_bytes


def with_work(alive: LiveTensors) -> tuple[float, float]:
    """Returns the bytes of a step, fixed and per image, including workspace of kernels."""
    return _WORK_BYTES + _WORK_SHARE * alive.fixed_bytes, _WORK_SHARE * alive.image_bytes


def _size_bytes(variables: Iterable[Any]) -> int:
    """Returns the bytes of variables, or of objects with a shape and a dtype."""
    return sum(math.prod(v.shape) * tf.as_dtype(v.dtype).size for v in variables)


def _upper_bound(model: keras.Model, size: StepSize) -> float:
    """Returns an upper bound of the memory of a step: all outputs of layers and their gradients.

    Infinity for nested layers, whose inner outputs are unknown.
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
    """Rejects a batch that does not fit into main memory, which all logical CPU devices share.

    Args:
        model: the unsplit model.
        optimizer_variables: see `MemoryEstimate.of`.
        size: size of a step on this memory.
        available: bytes; None if unknown.

    Raises:
        DeviceError: a step needs more than is available.
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
    """Returns the error for a batch that does not fit.

    Args:
        model, optimizer_variables, size: see `check_memory`.
        available: bytes; None for the memory of GPUs.
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
    """Returns advice on which batch size to use, if any fits."""
    fits = size.global_batch_size // 2
    if available is not None:
        room = available - estimate.fixed_bytes(size)
        fits = min(fits, int(room // (size.share_alive * estimate.image_bytes)))
    fits = fits // size.num_replicas * size.num_replicas
    if fits < size.num_replicas:
        return "not even one image for each replica fits, use fewer devices or another machine"
    what = "by the same estimate the largest that fits" if available is not None else "half of it"
    return f"use --global_batch_size={fits}, {what}, or less"
