"""A model with BatchNorm evaluates to another number after it was saved.

Reported for `MirroredStrategy`: each replica keeps moving statistics of its own examples and
evaluates with them, but only those of one replica are saved. The weights are right. Synchronised
statistics are the same on all replicas. The gradients depend on the replicas, too (see
`local_batch_norm.py`).
"""

import keras
import tensorflow as tf
from small import regression_data

BUG = "tensorflow/tensorflow#46488"
LINK = "https://github.com/tensorflow/tensorflow/issues/46488"
STAGE = "evaluation"
CAUSE = "local_statistics"
STATUS = "by design"
ALSO = (("forward", "local_statistics", "by design"),)


def normalised(synchronized: bool) -> keras.Model:
    layers = [
        keras.Input((6,)),
        keras.layers.Dense(8),
        keras.layers.BatchNormalization(momentum=0.5, synchronized=synchronized),
        keras.layers.Dense(2),
    ]
    network = keras.Sequential(layers, name="network")
    network.compile(optimizer=keras.optimizers.SGD(0.1), loss="mse")
    return network


def model() -> keras.Model:
    return normalised(synchronized=False)


def corrected_model() -> keras.Model:
    return normalised(synchronized=True)


def data(global_batch_size: int) -> tf.data.Dataset:
    return regression_data(global_batch_size)


def evaluation_data(global_batch_size: int) -> tf.data.Dataset:
    return regression_data(global_batch_size, 2 * global_batch_size)
