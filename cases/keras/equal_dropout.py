"""Each replica drops units of its own examples; Keras gives all replicas the same random state.

id = "keras/equal_dropout"
framework = "keras"
processes = 2
steps = 2
mode = "pair"
references = ["huggingface/transformers#31412"]
date = "2024-06"
tags = ["dropout", "mirrored", "sgd"]

[wrong.dropout_of_keras]
title = "the layer of Keras draws equal masks on all replicas"
place = { node = "random", step = 0, ranks = "all", tensors = "all" }
"""

import os

import keras
import numpy as np
import tensorflow as tf

from cases import harness

BUG = os.environ.get("BUG", "")
DEVICES = int(os.environ.get("DEVICES", 1))
BATCH_SIZE, UNITS, RATE = 12, 8, 0.5


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


class Dropout(keras.layers.Layer):
    """Draws a mask for the whole batch, of which each replica takes its rows."""

    def build(self, input_shape):
        self.step = self.add_weight(
            shape=(), initializer="zeros", trainable=False, aggregation="only_first_replica"
        )

    def call(self, inputs, training=False):
        if not training:
            return inputs
        seed = tf.stack([1, tf.cast(self.step.value, "int32")])
        self.step.assign_add(1.0)
        is_kept = tf.random.stateless_uniform((BATCH_SIZE, UNITS), seed) >= RATE
        size, first = tf.shape(inputs)[0], 0
        if DEVICES > 1:
            first = tf.distribute.get_replica_context().replica_id_in_sync_group * size
        return inputs * tf.cast(is_kept[first : first + size], inputs.dtype) / (1 - RATE)


def main():
    strategy = make_strategy()
    keras.utils.set_random_seed(1)
    with strategy.scope():
        dropout = Dropout()
        if BUG == "dropout_of_keras":
            dropout = keras.layers.Dropout(RATE, seed=1)
        model = keras.Sequential(
            [keras.Input((6,)), keras.layers.Dense(UNITS, "tanh"), dropout, keras.layers.Dense(2)]
        )
        model.compile(keras.optimizers.SGD(0.1), "mse")
    dataset = tf.data.Dataset.from_tensor_slices(get_data(2 * BATCH_SIZE)).batch(BATCH_SIZE)
    with harness.training(model):
        model.fit(dataset, verbose=0)


if __name__ == "__main__":
    main()
