"""A custom metric keeps a state that cannot be added up over the replicas.

Reported for Keras 3 with a metric that counts its inputs: the state of the replicas is put together
in another way than the metric expects, and the number depends on that of the replicas. Here a
metric keeps the largest error, and the sum of the replicas' states is none. The mean of
`keras.metrics.Mean` has a sum and a count, which can be added.
"""

import keras
import tensorflow as tf
from small import dense_layers, regression_data

BUG = "keras-team/keras#21054"
LINK = "https://github.com/keras-team/keras/issues/21054"
STAGE = "evaluation"
CAUSE = "other_metric"


class LargestError(keras.metrics.Metric):
    def __init__(self) -> None:
        super().__init__(name="largest_error")
        self.largest = self.add_weight(name="largest", initializer="zeros")

    def update_state(self, y: tf.Tensor, y_pred: tf.Tensor, sample_weight: object = None) -> None:
        self.largest.assign(tf.maximum(self.largest.value, tf.reduce_max(tf.abs(y - y_pred))))

    def result(self) -> tf.Tensor:
        return tf.convert_to_tensor(self.largest.value)


def with_metric(metric: keras.metrics.Metric) -> keras.Model:
    network = keras.Sequential(dense_layers(), name="network")
    network.compile(optimizer=keras.optimizers.SGD(0.1), loss="mse", metrics=[metric])
    return network


def model() -> keras.Model:
    return with_metric(LargestError())


def corrected_model() -> keras.Model:
    return with_metric(keras.metrics.MeanAbsoluteError())


def data(global_batch_size: int) -> tf.data.Dataset:
    return regression_data(global_batch_size)


def evaluation_data(global_batch_size: int) -> tf.data.Dataset:
    return regression_data(global_batch_size, 2 * global_batch_size)
