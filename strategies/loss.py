"""Computes the losses of examples, and the loss scale of their gradients.

Float16 ends at 65,504. Its backward pass starts from a loss scale, which keeps small gradients
above 6e-8 and is as large as possible: if a gradient overflows, the optimizer skips the step and
halves the scale. All devices must skip the same step, or their weights differ from then on. Where
every device has the sums of all gradients, all of them see the overflow; where each has the
gradients of its own weights, the others must be told (`share_overflow`).

Reference: P. Micikevicius et al., "Mixed Precision Training", 2017, section 3.2.
"""

from collections.abc import Sequence

import keras
import tensorflow as tf

from strategies.collectives import PerReplicaTensors


def sum_of_losses(logits: tf.Tensor, labels: tf.Tensor, label_smoothing: float = 0.0) -> tf.Tensor:
    """Computes the sum of the cross-entropies of a shard, a float32 scalar.

    A strategy divides this *sum* by the number of examples in the *whole* global batch.
    Gradients of this loss, summed over the replicas, are therefore the exact gradient of the mean
    over the global batch, however unevenly the batch is split. With a mean over the shard they are
    not: a mean of means gives examples of a small shard more weight.

    Keras losses are not used here, because they divide by the number of replicas inside a
    `tf.distribute` strategy.

    Args:
        logits: float `(n, num_classes)`, n the size of this shard, which may be 0.
        labels: int32 `(n,)`, in 0 to num_classes − 1.
        label_smoothing: fraction of the target that is spread evenly over all classes.
    """
    logits = tf.cast(logits, tf.float32)
    losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits)
    if not label_smoothing:
        return tf.reduce_sum(losses)
    # The mean of −log p over the classes is log Σ exp(logits) − mean(logits).
    evenly = tf.reduce_logsumexp(logits, axis=-1) - tf.reduce_mean(logits, axis=-1)
    return (1 - label_smoothing) * tf.reduce_sum(losses) + label_smoothing * tf.reduce_sum(evenly)


def unscaled(gradients: list[tf.Tensor], loss_scale: tf.Tensor | None) -> list[tf.Tensor]:
    """Returns the gradients divided by the loss scale, if there is one."""
    if loss_scale is None:
        return gradients
    return [gradient / tf.cast(loss_scale, gradient.dtype) for gradient in gradients]


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
