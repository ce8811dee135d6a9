"""A custom loss function returns the mean over its batch, a scalar.

Reported for `MirroredStrategy`, and for losses of libraries (tensorflow/similarity#200): Keras
divides losses of single examples by the number of replicas, but takes a scalar as it is. The
gradients of the replicas are summed, so the update is as many times too large as there are
replicas.
"""

import keras
import tensorflow as tf
from small import compiled_dense, regression_data

BUG = "tensorflow/tensorflow#42446"
LINK = "https://github.com/tensorflow/tensorflow/issues/42446"
STAGE = "loss"
CAUSE = "scalar_loss_not_divided"
NUM_REPLICAS = 3


def mean_absolute(y: tf.Tensor, y_pred: tf.Tensor) -> tf.Tensor:
    return tf.reduce_mean(tf.abs(y - y_pred))


def absolute_of_each(y: tf.Tensor, y_pred: tf.Tensor) -> tf.Tensor:
    return tf.reduce_mean(tf.abs(y - y_pred), axis=-1)


def model() -> keras.Model:
    return compiled_dense(loss=mean_absolute)


def corrected_model() -> keras.Model:
    return compiled_dense(loss=absolute_of_each)


def data(global_batch_size: int) -> tf.data.Dataset:
    return regression_data(global_batch_size)
