"""A loss class divides by the number of replicas, as custom loops do, and fit divides once more.

id = "keras/loss_divided_twice"
framework = "keras"
processes = 2
steps = 2
mode = "pair"
references = ["keras-team/keras#16285"]
date = "2022-03"
tags = ["mirrored", "sgd"]

[wrong.divided_by_replicas]
title = "the loss class divides by the number of replicas, too"
place = { node = "loss", step = 0, ranks = "all", tensors = "all" }
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


class SquaredError(keras.losses.Loss):
    def call(self, y, y_pred):
        losses = tf.reduce_mean(tf.square(y - y_pred), axis=-1)
        if BUG == "divided_by_replicas":
            losses = losses / tf.distribute.get_strategy().num_replicas_in_sync
        return losses


def main():
    strategy = make_strategy()
    keras.utils.set_random_seed(1)
    with strategy.scope():
        model = keras.Sequential(
            [keras.Input((6,)), keras.layers.Dense(8, "tanh"), keras.layers.Dense(2)]
        )
        model.compile(keras.optimizers.SGD(0.1), SquaredError())
    dataset = tf.data.Dataset.from_tensor_slices(get_data(2 * BATCH_SIZE)).batch(BATCH_SIZE)
    with harness.training(model):
        model.fit(dataset, verbose=0)


if __name__ == "__main__":
    main()
