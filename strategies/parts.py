"""Holds the part of a copy of the weights that a device stores, and the view of the whole copy.

`sharded` splits each weight into ranges of its elements, `tensor` into output channels, and
`pipeline` gives each device the weights of consecutive layers.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from strategies.collectives import PerReplicaTensors
from strategies.copies import optimizer_names
from strategies.loss import loss_scale_of, share_overflow
from strategies.replica import copies_of


class DevicePart(NamedTuple):
    """Holds a device's part of one copy of the weights, and the optimizer of this part.

    Attributes:
        device: device name.
        weights: path of a trainable variable of the model → the part of it on this device.
        statistics: for each shard, path of a non-trainable variable → the part on this device.
        optimizer: optimizer of `weights`.
        take: maps a whole tensor to the part of it on this device.
    """

    device: str
    weights: dict[str, keras.Variable]
    statistics: list[dict[str, keras.Variable]]
    optimizer: keras.optimizers.Optimizer
    take: Callable[[tf.Tensor], tf.Tensor]

    @classmethod
    def create(
        cls,
        device: str,
        optimizer_fn: Callable[[], keras.optimizers.Optimizer],
        trainable: Sequence[keras.Variable],
        others: Sequence[keras.Variable] = (),
        *,
        num_shards: int = 1,
        take: Callable[[tf.Tensor], tf.Tensor] = tf.identity,
    ) -> "DevicePart":
        """Creates the variables on the device, with the values of the model's variables.

        Args:
            device: device name.
            optimizer_fn: creates the optimizer.
            trainable: trainable variables of the model.
            others: non-trainable variables of the model.
            num_shards: number of shards with statistics of their own.
            take: maps a whole tensor to the part of it on this device.
        """
        with tf.device(device):
            weights = copies_of(trainable, take)
            statistics = [copies_of(others, take) for _ in range(num_shards)]
            optimizer = optimizer_fn()
            optimizer.build(list(weights.values()))
        return cls(device, weights, statistics, optimizer, take)

    @property
    def weight_shapes(self) -> dict[str, tuple[int, ...]]:
        """Path of each weight → shape of its part."""
        return {path: tuple(weight.shape) for path, weight in self.weights.items()}

    def read_weights(self) -> dict[str, tf.Tensor]:
        """Reads the weights once, so that the whole step uses the same values."""
        with tf.device(self.device):
            return {path: tf.identity(weight.value) for path, weight in self.weights.items()}

    def take_all(self, wholes: Iterable[tf.Tensor]) -> list[tf.Tensor]:
        """Returns the part of each whole tensor, on this device."""
        with tf.device(self.device):
            return [self.take(whole) for whole in wholes]

    def assign_weights(self, wholes: Iterable[tf.Tensor]) -> None:
        """Assigns the parts of whole weights, given in the order of `weights`."""
        with tf.device(self.device):
            for weight, whole in zip(self.weights.values(), wholes, strict=True):
                weight.assign(self.take(whole))

    def variables(self) -> dict[str, tf.Variable]:
        """Returns name → variable for the weights and the optimizer, with the names of a state."""
        names = [f"model/{path}" for path in self.weights] + optimizer_names(self.optimizer)
        variables = [*self.weights.values(), *self.optimizer.variables]
        return {name: v.value for name, v in zip(names, variables, strict=True)}

    def shard_variables(self, index: int) -> dict[str, tf.Variable]:
        """Returns name → variable for the statistics of a shard, with the names of a state."""
        return {f"model/{path}": v.value for path, v in self.statistics[index].items()}


def update_parts(parts: Sequence[DevicePart], per_part_sums: PerReplicaTensors) -> None:
    """Updates the weights of each part; with loss scaling, all devices skip the same steps.

    Args:
        parts: the parts of one copy.
        per_part_sums: for each part, the summed gradients of its weights.
    """
    if loss_scale_of(parts[0].optimizer) is not None:
        per_part_sums = share_overflow(per_part_sums, [part.device for part in parts])
    for part, sums in zip(parts, per_part_sums, strict=True):
        with tf.device(part.device):
            part.optimizer.apply(sums, list(part.weights.values()))


class WholeVariable:
    """Represents a whole variable of which several devices store a part, or a copy each.

    Args:
        parts: variables, each on its device.
        axis: axis along which the parts form the whole; None if each part is a copy of the whole.
        shape: shape of the whole, if the parts are flat ranges of its elements; None for the shape
            of the joined parts.
    """

    def __init__(
        self,
        parts: Sequence[tf.Variable],
        axis: int | None = None,
        shape: Sequence[int] | None = None,
    ):
        self.parts, self.axis = list(parts), axis
        self._joined_shape = self.parts[0].shape.as_list()
        if axis is not None:
            self._joined_shape[axis] = sum(part.shape[axis] for part in self.parts)
        self.shape = tf.TensorShape(self._joined_shape if shape is None else shape)
        self.dtype = tf.as_dtype(self.parts[0].dtype)

    def numpy(self) -> np.ndarray:
        """Returns the whole array."""
        if self.axis is None:
            return self.parts[0].numpy()
        return np.concatenate([p.numpy() for p in self.parts], self.axis).reshape(self.shape)

    def assign(self, value: np.ndarray) -> None:
        """Assigns a whole array: to each device its part, or the copy."""
        pieces = [value] * len(self.parts)
        if self.axis is not None:
            ends = np.cumsum([part.shape[self.axis] for part in self.parts])
            pieces = np.split(np.reshape(value, self._joined_shape), ends[:-1], self.axis)
        for part, piece in zip(self.parts, pieces, strict=True):
            part.assign(piece)


def whole_variables(
    names: Iterable[str],
    per_device_variables: Sequence[Mapping[str, tf.Variable]],
    axis: int | None,
    shapes: Mapping[str, Sequence[int]] | None = None,
) -> dict[str, Any]:
    """Returns name → view of the whole variable, in the order of the names.

    Args:
        names: names of variables.
        per_device_variables: for each device, name → its part of the variable; a device may have
            no part.
        axis: see `WholeVariable`. Scalars, such as step counters, are copied to every device.
        shapes: name → shape of the whole, if the parts are flat ranges of its elements.
    """
    wholes: dict[str, Any] = {}
    for name in names:
        parts = [named[name] for named in per_device_variables if name in named]
        is_scalar = parts[0].shape.rank == 0
        shape = shapes[name] if shapes else None
        wholes[name] = WholeVariable(parts, None if is_scalar else axis, shape)
    return wholes
