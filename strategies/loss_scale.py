"""Shares overflows of float16 between devices, for optimizers that skip such steps.

Float16 ends at 65,504. The backward pass starts from a loss scale, which keeps small gradients
above 6e-8 (`loss.py`) and is as large as possible: if a gradient overflows, the optimizer skips the
step and halves the scale. All devices must skip the same step, or their weights differ from then
on. Where every device has the sums of all gradients, all of them see the overflow; where each has
the gradients of its own weights, the others must be told.

Reference: P. Micikevicius et al., "Mixed Precision Training", 2017, section 3.2.
"""

from collections.abc import Sequence

import keras
import tensorflow as tf

from strategies.collectives import PerReplicaTensors


def loss_scale_of(optimizer: keras.optimizers.Optimizer) -> tf.Tensor | None:
    """Returns the loss scale of the next step, a float32 scalar; None without loss scaling.

    In the context of a replica, the value of that replica.
    """
    scale = getattr(optimizer, "loss_scale", None)
    return None if scale is None else tf.convert_to_tensor(scale.value)


def are_finite(tensors: Sequence[tf.Tensor]) -> tf.Tensor:
    """Returns whether no element of any tensor is infinite or NaN, a bool scalar."""
    return tf.reduce_all([tf.reduce_all(tf.math.is_finite(tensor)) for tensor in tensors])


def replaced_by_nan(tensors: Sequence[tf.Tensor], are_right: tf.Tensor) -> list[tf.Tensor]:
    """Returns the tensors if `are_right`, else NaN in each element."""
    return [tf.where(are_right, tensor, tf.cast(float("nan"), tensor.dtype)) for tensor in tensors]


def share_overflow(
    per_device_gradients: PerReplicaTensors, devices: Sequence[str]
) -> PerReplicaTensors:
    """Returns the gradients of each device; NaN on every device if there is an overflow on one.

    Args:
        per_device_gradients: one list per device, with the gradients of its own weights.
        devices: their names.
    """
    flags = []
    for device, gradients in zip(devices, per_device_gradients, strict=True):
        with tf.device(device):
            flags.append(are_finite(gradients))
    with tf.device(devices[0]):
        are_all_finite = tf.reduce_all(flags)
    shared = []
    for device, gradients in zip(devices, per_device_gradients, strict=True):
        with tf.device(device):
            shared.append(replaced_by_nan(gradients, are_all_finite))
    return shared


def apply_in_parts(
    devices: Sequence[str],
    optimizers: Sequence[keras.optimizers.Optimizer],
    weights: Sequence[Sequence[keras.Variable]],
    per_device_sums: PerReplicaTensors,
) -> None:
    """Updates each device's own weights; with loss scaling, all devices skip the same steps.

    Args:
        devices: their names.
        optimizers: for each device, the optimizer of its weights.
        weights: for each device, its weights.
        per_device_sums: for each device, the summed gradients of its weights.
    """
    if loss_scale_of(optimizers[0]) is not None:
        per_device_sums = share_overflow(per_device_sums, devices)
    parts = zip(devices, optimizers, weights, per_device_sums, strict=True)
    for device, optimizer, own, sums in parts:
        with tf.device(device):
            optimizer.apply(sums, own)
