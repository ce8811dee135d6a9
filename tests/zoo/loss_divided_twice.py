"""The loss is divided by the size of the global batch, and then by the number of replicas, too.

Reported as "distributed training on x GPUs makes the loss 1/x": a `keras.losses.Loss` sums over its
batch and divides by the size of the global one, which is right, but Keras divides the result by the
number of replicas once more. With the reduction "sum", it does not.
"""

import keras
import tensorflow as tf
from small import compiled_dense, regression_data

BUG = "keras-team/keras#16285"
LINK = "https://github.com/keras-team/keras/issues/16285"
STAGE = "loss"
CAUSE = "scaled_gradient"


class ShareOfBatch(keras.losses.Loss):
    def __init__(self, global_batch_size: int, reduction: str):
        super().__init__(name="share_of_batch", reduction=reduction)
        self.global_batch_size = global_batch_size

    def call(self, y: tf.Tensor, y_pred: tf.Tensor) -> tf.Tensor:
        losses = tf.reduce_mean(tf.square(y - y_pred), axis=-1)
        return tf.reduce_sum(losses) / self.global_batch_size


def model() -> keras.Model:
    return compiled_dense(loss=ShareOfBatch(12, "sum_over_batch_size"))


def corrected_model() -> keras.Model:
    return compiled_dense(loss=ShareOfBatch(12, "sum"))


def data(global_batch_size: int) -> tf.data.Dataset:
    return regression_data(global_batch_size)
