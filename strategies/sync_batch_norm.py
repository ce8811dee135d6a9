"""Implements synchronised BatchNorm: statistics over the global batch instead of each shard.

Layers are called for all replicas together: forward and backward pass of a BatchNorm layer need
the sums of all replicas. Each replica sends three numbers per channel: count, mean and sum of
squared deviations.
"""

import functools
from collections.abc import Callable, Sequence

import keras
import tensorflow as tf

from strategies.base import Strategy
from strategies.collectives import add_in_order
from strategies.device_tape import DeviceTape, PerDeviceTensors
from strategies.layer_calls import LayerCall, LayerCalls, with_values
from strategies.loss import unscaled
from strategies.observer import Shard
from strategies.replica import Replica
from strategies.step_totals import StepTotals
from strategies.tf_private import flatten_layers


def check_synchronizable(model: keras.Model) -> None:
    """Checks that `synchronized_gradients` supports every BatchNorm layer of a model.

    Raises:
        ValueError: a BatchNorm layer is inside another layer, or does not normalise by channels.
    """
    called = {id(call.layer) for call in LayerCalls.of(model).calls}
    for layer in flatten_layers(model):
        if not isinstance(layer, keras.layers.BatchNormalization):
            continue
        is_supported = id(layer) in called and not layer.renorm
        if not is_supported or layer.axis not in (-1, len(layer.output.shape) - 1):
            raise ValueError(
                f"layer {layer.name}: --batch_norm=sync needs BatchNorm layers outside of other"
                " layers, with channels on the last axis and no renorm; use --batch_norm=average"
            )


def synchronized_gradients(
    strategy: Strategy,
    replicas: Sequence[Replica],
    shards: Sequence[Sequence[tf.Tensor]],
    num_global_examples: tf.Tensor,
) -> tuple[list[list[tf.Tensor]], list[StepTotals]]:
    """Computes the gradients and totals of all replicas with synchronised BatchNorm.

    Replaces `local_gradients`, which handles each replica separately.

    Args:
        strategy: defines the loss and the observer.
        replicas: the replicas, each on its device.
        shards: images and labels of each replica, on its device.
        num_global_examples: int scalar.

    Returns:
        For each replica, the gradients of the loss of all replicas with respect to its copy of the
        weights, and its totals. Summed over the replicas, they are the gradients of the mean loss.
    """
    devices = [replica.device for replica in replicas]
    tape = DeviceTape(devices)
    per_replica_calls = [LayerCalls.of(replica.model) for replica in replicas]
    first = per_replica_calls[0]
    values = {first.input: [images for images, _ in shards]}
    for position, call in enumerate(first.calls):
        layers = [calls.calls[position].layer for calls in per_replica_calls]
        inputs = [values[i] for i in call.inputs]
        is_batch_norm = isinstance(call.layer, keras.layers.BatchNormalization)
        if is_batch_norm and call.layer.trainable:
            values[call.output] = _normalize(tape, replicas, layers, inputs[0])
        else:
            in_training = functools.partial(_call_in_training, call)
            values[call.output] = _on_each(tape, replicas, layers, in_training, inputs)
    logits = values[first.output]
    losses, totals, logits_gradients = [], [], []
    for own_logits, device, (_, labels) in zip(logits, devices, shards, strict=True):
        with tf.device(device):
            loss, own_totals, gradient = strategy.loss_and_logits_gradient(
                own_logits, labels, num_global_examples
            )
        losses.append(loss)
        totals.append(own_totals)
        logits_gradients.append(gradient)
    weights = [replica.weights for replica in replicas]
    per_replica_gradients = tape.gradient(logits, logits_gradients, weights)
    for r, (images, labels) in enumerate(shards):
        with tf.device(devices[r]):
            examples = Shard(images, labels, num_global_examples, logits[r])
            gradients = unscaled(per_replica_gradients[r], strategy.loss_scale)
            per_replica_gradients[r] = strategy.observer.on_shard(
                replicas[r].replica_id, examples, losses[r], gradients
            )
    return per_replica_gradients, totals


def _call_in_training(call: LayerCall, layer: keras.layers.Layer, *tensors: tf.Tensor) -> tf.Tensor:
    return call(tensors, training=True, layer=layer)


def _on_each(
    tape: DeviceTape,
    replicas: Sequence[Replica],
    layers: Sequence[keras.layers.Layer],
    function: Callable[..., tf.Tensor],
    inputs: Sequence[PerDeviceTensors],
) -> PerDeviceTensors:
    """Calls function(layer, *tensors) for the layer of each replica, on the replica's device."""

    def call_one(d: int, *tensors: tf.Tensor) -> tf.Tensor:
        own = {variable.path for variable in layers[d].variables}
        values = [pair for pair in replicas[d].values(0) if pair[0].path in own]
        return with_values(lambda: function(layers[d], *tensors), values)

    weights = [replica.weights_of(layer) for replica, layer in zip(replicas, layers, strict=True)]
    return tape.each(call_one, inputs, weights)


def _normalize(
    tape: DeviceTape,
    replicas: Sequence[Replica],
    layers: Sequence[keras.layers.BatchNormalization],
    inputs: PerDeviceTensors,
) -> PerDeviceTensors:
    """Normalises the examples of all replicas by the mean and variance over all replicas.

    Each replica computes the count, mean and sum of squared deviations of its own examples, and
    combines those of all replicas into the same mean and variance. Unlike a mean of squares, this
    does not lose precision when the mean is large.

    Reference: T. Chan et al., "Updating Formulae and a Pairwise Algorithm for Computing Sample
        Variances", 1979.
    """
    num_channels = layers[0].moving_mean.shape[0]

    def local_moments(d: int, x: tf.Tensor) -> tf.Tensor:
        if x.dtype in (tf.float16, tf.bfloat16):
            x = tf.cast(x, tf.float32)  # 16 bits are too few for sums over a batch.
        axes = list(range(len(x.shape) - 1))
        count = tf.cast(tf.size(x) // num_channels, x.dtype)
        mean = tf.reduce_mean(x, axes)
        squares = tf.reduce_sum(tf.math.squared_difference(x, mean), axes)
        return tf.stack([tf.fill([num_channels], count), mean, squares])

    def normalized(
        layer: keras.layers.BatchNormalization, x: tf.Tensor, moments: tf.Tensor
    ) -> tf.Tensor:
        mean, variance = _combined(tf.split(moments, len(replicas), axis=-1))
        return _apply(layer, x, mean, variance)

    per_replica_moments = tape.each(local_moments, [inputs])
    gathered = tape.gather(per_replica_moments, [num_channels] * len(replicas))
    return _on_each(tape, replicas, layers, normalized, [inputs, gathered])


def _combined(per_replica_moments: Sequence[tf.Tensor]) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns mean and variance over all examples, from per-replica moments `(3, channels)`."""
    counts, means, squares = zip(*map(tf.unstack, per_replica_moments), strict=True)
    count = add_in_order(counts)
    mean = add_in_order([n * m for n, m in zip(counts, means, strict=True)]) / count
    between = add_in_order([n * (m - mean) ** 2 for n, m in zip(counts, means, strict=True)])
    return mean, (add_in_order(squares) + between) / count


def _apply(
    layer: keras.layers.BatchNormalization, x: tf.Tensor, mean: tf.Tensor, variance: tf.Tensor
) -> tf.Tensor:
    """Applies the layer in training mode, with the given moments."""
    for moving, new in ((layer.moving_mean, mean), (layer.moving_variance, variance)):
        moving.assign(moving * layer.momentum + new * (1 - layer.momentum))
    dtype = mean.dtype
    normalized = keras.ops.batch_normalization(
        tf.cast(x, dtype),
        mean,
        variance,
        axis=layer.axis,
        offset=keras.ops.cast(layer.beta, dtype) if layer.center else None,
        scale=keras.ops.cast(layer.gamma, dtype) if layer.scale else None,
        epsilon=layer.epsilon,
    )
    return tf.cast(normalized, layer.compute_dtype)
