"""Each replica adds the whole regularisation loss, and the sum over the replicas has it R times.

Fixed in Keras by dividing `model.losses` by the number of replicas, as the losses of the data. A
custom `compute_loss` that adds `sum(self.losses)` has the bug again.
"""

import keras
import tensorflow as tf
from small import dense_layers, regression_data

BUG = "keras-team/keras#20609"
LINK = "https://github.com/keras-team/keras/pull/20609"
STAGE = "regularisation"
CAUSE = "regulariser_repeated"


class AddsAllLosses(keras.Sequential):
    def compute_loss(
        self, x: object, y: object, y_pred: object, sample_weight: object, training: bool = True
    ) -> tf.Tensor:
        data_loss = keras.losses.MeanSquaredError()(y, y_pred, sample_weight)
        return data_loss + tf.add_n(self.losses)


class AddsItsShare(keras.Sequential):
    def compute_loss(
        self, x: object, y: object, y_pred: object, sample_weight: object, training: bool = True
    ) -> tf.Tensor:
        data_loss = keras.losses.MeanSquaredError()(y, y_pred, sample_weight)
        return data_loss + tf.nn.scale_regularization_loss(tf.add_n(self.losses))


def regularised(kind: type[keras.Sequential]) -> keras.Model:
    network = kind(dense_layers(kernel_regularizer=keras.regularizers.L2(0.1)), name="network")
    network.compile(optimizer=keras.optimizers.SGD(0.1))
    return network


def model() -> keras.Model:
    return regularised(AddsAllLosses)


def corrected_model() -> keras.Model:
    return regularised(AddsItsShare)


def data(global_batch_size: int) -> tf.data.Dataset:
    return regression_data(global_batch_size)
