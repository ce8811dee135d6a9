"""The optimizer sums the gradients of all replicas, which the first versions of Keras 3 did not.

id = "keras/no_all_reduce"
framework = "keras"
processes = 2
steps = 2
mode = "pair"
references = ["keras-team/keras#19891"]
date = "2024-06"
tags = ["mirrored", "sgd"]

[wrong.own_gradients]
title = "each replica applies its own gradients"
place = { node = "sum", step = 0, ranks = "all", tensors = "all" }
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


class SGD(keras.optimizers.SGD):
    def _all_reduce_sum_gradients(self, grads_and_vars):
        if BUG == "own_gradients":
            return grads_and_vars
        return super()._all_reduce_sum_gradients(grads_and_vars)


def main():
    strategy = make_strategy()
    keras.utils.set_random_seed(1)
    with strategy.scope():
        model = keras.Sequential(
            [keras.Input((6,)), keras.layers.Dense(8, "tanh"), keras.layers.Dense(2)]
        )
        model.compile(SGD(0.1), "mse")
    dataset = tf.data.Dataset.from_tensor_slices(get_data(2 * BATCH_SIZE)).batch(BATCH_SIZE)
    with harness.training(model):
        model.fit(dataset, verbose=0)


if __name__ == "__main__":
    main()
