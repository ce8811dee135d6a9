"""A compute_loss adds the regularisation losses, which each replica has in full.

id = "keras/regulariser_repeated"
framework = "keras"
processes = 2
steps = 2
mode = "pair"
references = ["keras-team/keras#20609"]
date = "2024-12"
tags = ["mirrored", "sgd"]

[wrong.added_in_full]
title = "each replica adds them in full"
place = { node = "loss", step = 0, ranks = "all", tensors = ["dense/kernel"] }
"""

import os

import keras
import numpy as np
import tensorflow as tf

from cases import harness

BUG = os.environ.get("BUG", "")
DEVICES = int(os.environ.get("DEVICES", 1))
BATCH_SIZE = 12


def make_strategy():
    cpu = tf.config.list_physical_devices("CPU")[0]
    parts = [tf.config.LogicalDeviceConfiguration()] * DEVICES
    tf.config.set_logical_device_configuration(cpu, parts)
    return tf.distribute.MirroredStrategy(
        [f"CPU:{i}" for i in range(DEVICES)],
        cross_device_ops=tf.distribute.ReductionToOneDevice(),
    )


def get_data(num_examples):
    random = np.random.default_rng(0)
    x = random.normal(size=(num_examples, 6)).astype("float32")
    return x, np.tanh(x @ random.normal(size=(6, 2))).astype("float32")


class AddsItsLosses(keras.Sequential):
    def compute_loss(self, x, y, y_pred, sample_weight=None, training=True):
        penalty = tf.add_n(self.losses)
        if BUG != "added_in_full":
            penalty = tf.nn.scale_regularization_loss(penalty)
        return keras.losses.MeanSquaredError()(y, y_pred, sample_weight) + penalty


def main():
    strategy = make_strategy()
    keras.utils.set_random_seed(1)
    penalty = keras.regularizers.L2(0.1)
    with strategy.scope():
        model = AddsItsLosses(
            [
                keras.Input((6,)),
                keras.layers.Dense(8, "tanh", kernel_regularizer=penalty),
                keras.layers.Dense(2),
            ]
        )
        model.compile(keras.optimizers.SGD(0.1))
    dataset = tf.data.Dataset.from_tensor_slices(get_data(2 * BATCH_SIZE)).batch(BATCH_SIZE)
    with harness.training(model):
        model.fit(dataset, verbose=0)


if __name__ == "__main__":
    main()
