"""Logits of a shard in evaluation, with BatchNorm statistics that are given."""

from collections.abc import Callable, Mapping

import keras
import tensorflow as tf


def predict_shard(
    model: keras.Model, images: tf.Tensor, statistics: Mapping[str, tf.Tensor]
) -> tf.Tensor:
    """Returns the logits `(n, num_classes)` of a shard, which may be empty.

    Changes nothing: the model's own moving statistics are replaced for this call alone.

    Args:
        model: on this device.
        images: uint8 `(n, height, width, channels)`.
        statistics: path of a variable → tensor to take in its place.
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

    oneDNN's fused convolutions refuse an empty batch: it gets a blank image, and no logits.
    """
    num_images = tf.shape(images)[0]
    num_blanks = tf.cast(num_images == 0, tf.int32)
    padded = tf.pad(images, [[0, num_blanks], *[[0, 0]] * (len(images.shape) - 1)])
    return call(padded)[:num_images]
