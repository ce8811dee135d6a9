"""The learning rate falls when the loss does not, and every replica has to see the same loss.

id = "keras/learning_rate_by_rank"
framework = "keras"
processes = 2
steps = 2
mode = "pair"
references = ["rmchurch/disruptcnn#3"]
tags = ["mirrored", "sgd"]

[wrong.own_plateau]
title = "the second replica lowers its learning rate alone"
place = { node = "update", step = 0, ranks = [1], tensors = "all" }
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
    def _backend_update_step(self, grads, trainable_variables, learning_rate):
        if BUG == "own_plateau":
            replica = tf.distribute.get_replica_context().replica_id_in_sync_group
            learning_rate = tf.where(replica == 1, 0.1 * learning_rate, learning_rate)
        super()._backend_update_step(grads, trainable_variables, learning_rate)


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
