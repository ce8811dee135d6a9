"""Synchronised BatchNorm corrects the moving variance by the number of a replica's own values.

Reported for `SyncBatchNorm` with inputs of different sizes: mean and variance are those of all
replicas, but n / (n - 1) is not, and the moving variances drift apart. The loss of each step is
right; only the evaluation depends on the replica that it takes the statistics from.
"""

import keras
import tensorflow as tf
from small import regression_data

BUG = "pytorch/pytorch#22192"
LINK = "https://github.com/pytorch/pytorch/issues/22192"
STAGE = "statistics"
CAUSE = "local_statistics"
TENSORS = "moving_variance"


class Unbiased(keras.layers.BatchNormalization):
    def call(self, inputs: tf.Tensor, training: bool = False, mask: object = None) -> tf.Tensor:
        before = tf.identity(self.moving_variance.value)
        outputs = super().call(inputs, training=training, mask=mask)
        if training:
            count = tf.cast(tf.shape(inputs)[0], "float32")
            added = self.moving_variance.value - self.momentum * before
            self.moving_variance.assign_add(added / (count - 1))
        return outputs


def normalised(layer: keras.layers.Layer) -> keras.Model:
    layers = [keras.Input((6,)), keras.layers.Dense(8), layer, keras.layers.ReLU()]
    network = keras.Sequential([*layers, keras.layers.Dense(2)], name="network")
    loss = keras.losses.MeanSquaredError(reduction="sum")
    network.compile(optimizer=keras.optimizers.SGD(0.01), loss=loss)
    return network


def model() -> keras.Model:
    return normalised(Unbiased(synchronized=True))


def corrected_model() -> keras.Model:
    return normalised(keras.layers.BatchNormalization(synchronized=True))


def data(global_batch_size: int) -> tf.data.Dataset:
    return regression_data(global_batch_size, 2 * global_batch_size - 3)  # 6 and 6, 5 and 4.
