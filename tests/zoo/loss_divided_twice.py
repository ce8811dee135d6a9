"""The loss is divided by the number of replicas, and Keras divides it once more.

Reported as "distributed training on x GPUs makes the loss 1/x": a loss class divides by the size of
the global batch, as the tutorials of custom training loops do, and `fit` divides once more. Keras 3
does so with losses of single examples, not with a scalar. Here, the class divides these by the
number of replicas. The update is too small by that number.
"""

import keras
import tensorflow as tf
from small import compiled_dense, regression_data

BUG = "keras-team/keras#16285"
LINK = "https://github.com/keras-team/keras/issues/16285"
STAGE = "loss"
CAUSE = "scaled_gradient"


class LossOfExamples(keras.losses.Loss):
    def call(self, y: tf.Tensor, y_pred: tf.Tensor) -> tf.Tensor:
        return tf.reduce_mean(tf.square(y - y_pred), axis=-1)


class ShareOfGlobalBatch(LossOfExamples):
    def call(self, y: tf.Tensor, y_pred: tf.Tensor) -> tf.Tensor:
        return super().call(y, y_pred) / tf.distribute.get_strategy().num_replicas_in_sync


def model() -> keras.Model:
    return compiled_dense(loss=ShareOfGlobalBatch())


def corrected_model() -> keras.Model:
    return compiled_dense(loss=LossOfExamples())


def data(global_batch_size: int) -> tf.data.Dataset:
    return regression_data(global_batch_size)
