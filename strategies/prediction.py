"""Computes the logits of a shard in evaluation, with given BatchNorm statistics."""

from collections.abc import Callable, Mapping

import keras
import tensorflow as tf


def predict_shard(
    model: keras.Model, images: tf.Tensor, statistics: Mapping[str, tf.Tensor]
) -> tf.Tensor:
    """Returns the logits `(n, num_classes)` of a shard, which may be empty.

    Changes no state: the model's moving statistics are replaced only for this call.

    Args:
        model: a model on the current device.
        images: uint8 `(n, height, width, channels)`.
        statistics: path of a variable → tensor that replaces its value.
    """
    replaced = [(v, statistics[v.path]) for v in model.variables if v.path in statistics]

    def call(images: tf.Tensor) -> tf.Tensor:
        with keras.StatelessScope(state_mapping=replaced):
            return model(images, training=False)

    return call_without_empty_batch(call, images)


def call_without_empty_batch(
    call: Callable[[tf.Tensor], tf.Tensor], images: tf.Tensor
) -> tf.Tensor:
    """Returns the logits of a shard, which may be empty.

    oneDNN's fused convolutions fail on an empty batch, which is therefore padded with a blank
    image whose logits are removed.
    """
    num_images = tf.shape(images)[0]
    num_blanks = tf.cast(num_images == 0, tf.int32)
    padded = tf.pad(images, [[0, num_blanks], *[[0, 0]] * (len(images.shape) - 1)])
    return call(padded)[:num_images]
