"""Splits tensors and variables into flat ranges of elements, one per device."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from strategies.collectives import PerReplicaTensors, shard_bounds, shard_sizes
from strategies.gather_scatter import all_gather, reduce_scatter
from strategies.loss import apply_in_parts
from strategies.split_variable import RepeatedVariable, SplitVariable


def part_of(tensor: tf.Tensor, device_id: int, num_devices: int) -> tf.Tensor:
    """Returns a device's part of a flattened tensor, with the bounds of `shard_bounds`."""
    flat = tf.reshape(tensor, [-1])
    start, end = shard_bounds(flat.shape[0], num_devices, device_id)
    return flat[start:end]


def own_parts(per_device_tensors: PerReplicaTensors, devices: Sequence[str]) -> PerReplicaTensors:
    """Returns to each device its part of each of its tensors."""
    per_device_parts = []
    for d, (device, tensors) in enumerate(zip(devices, per_device_tensors, strict=True)):
        with tf.device(device):
            per_device_parts.append([part_of(tensor, d, len(devices)) for tensor in tensors])
    return per_device_parts


def reduce_scatter_all(
    per_replica_tensors: PerReplicaTensors, devices: Sequence[str]
) -> PerReplicaTensors:
    """Sums tensors over the replicas and returns to each device its part of each sum.

    Args:
        per_replica_tensors: R lists of V tensors; item [r][v] is on device r.
        devices: R device names.

    Returns:
        R lists of V flat tensors; item [r][v] is part r of sum v, on device r.
    """
    per_replica_flat = []
    for device, tensors in zip(devices, per_replica_tensors, strict=True):
        with tf.device(device):
            per_replica_flat.append([tf.reshape(tensor, [-1]) for tensor in tensors])
    per_tensor_parts = []
    for copies in zip(*per_replica_flat, strict=True):
        sizes = shard_sizes(copies[0].shape[0], len(devices))
        per_tensor_parts.append(reduce_scatter(copies, sizes, devices))
    return [list(parts) for parts in zip(*per_tensor_parts, strict=True)]


def all_gather_all(
    per_device_parts: PerReplicaTensors,
    shapes: Iterable[Sequence[int]],
    devices: Sequence[str],
) -> PerReplicaTensors:
    """Joins the parts of each tensor on every device; the inverse of the scatter.

    Args:
        per_device_parts: R lists of V flat tensors.
        shapes: shapes of the V whole tensors.
        devices: R device names.

    Returns:
        R lists of V whole tensors; item [r][v] is on device r and bitwise identical for every r.
    """
    per_tensor_wholes = [
        all_gather(parts, devices) for parts in zip(*per_device_parts, strict=True)
    ]
    per_device_wholes = []
    for device, wholes in zip(devices, zip(*per_tensor_wholes, strict=True), strict=True):
        with tf.device(device):
            per_device_wholes.append(
                [tf.reshape(whole, shape) for whole, shape in zip(wholes, shapes, strict=True)]
            )
    return per_device_wholes


class Part(NamedTuple):
    """Holds a device's part of each weight, a flat range of elements, and its optimizer."""

    device_id: int
    devices: Sequence[str]
    weights: list[keras.Variable]
    optimizer: keras.optimizers.Optimizer

    @classmethod
    def create(
        cls,
        variables: Sequence[keras.Variable],
        device_id: int,
        devices: Sequence[str],
        optimizer_fn: Callable[[], keras.optimizers.Optimizer],
    ) -> "Part":
        """Creates a device's part of whole variables, with their names and values."""
        with tf.device(devices[device_id]):
            weights = [
                keras.Variable(
                    part_of(tf.convert_to_tensor(v.value), device_id, len(devices)),
                    dtype=v.dtype,
                    name=v.path.replace("/", "_"),
                )
                for v in variables
            ]
            optimizer = optimizer_fn()
            optimizer.build(weights)
        return cls(device_id, devices, weights, optimizer)

    def read(self) -> list[tf.Tensor]:
        """Reads the parts once, so that every device gets the same values."""
        with tf.device(self.devices[self.device_id]):
            return [tf.identity(weight.value) for weight in self.weights]

    def take(self, wholes: Sequence[keras.Variable]) -> None:
        """Assigns the device's part of each whole weight that is stored on the device."""
        with tf.device(self.devices[self.device_id]):
            for own, whole in zip(self.weights, wholes, strict=True):
                value = tf.convert_to_tensor(whole.value)
                own.assign(part_of(value, self.device_id, len(self.devices)))


def update_parts(parts: Sequence[Part], per_device_sums: PerReplicaTensors) -> None:
    """Updates each device's part of the weights with its part of the summed gradients."""
    optimizers = [part.optimizer for part in parts]
    weights = [part.weights for part in parts]
    apply_in_parts(parts[0].devices, optimizers, weights, per_device_sums)


def whole_variables(
    shapes: Mapping[str, Sequence[int]], per_device_parts: Sequence[Sequence[keras.Variable]]
) -> dict[str, Any]:
    """Returns the unsplit views of variables with flat parts; every device has scalars whole.

    Args:
        shapes: name → shape of the whole variable.
        per_device_parts: for each device, its part of each variable.
    """
    wholes: dict[str, Any] = {}
    for (name, shape), parts in zip(
        shapes.items(), zip(*per_device_parts, strict=True), strict=True
    ):
        values = [part.value for part in parts]
        is_scalar = len(parts[0].shape) == 0
        wholes[name] = RepeatedVariable(values) if is_scalar else SplitVariable(values, 0, shape)
    return wholes
