"""The last batch of an epoch has 5 examples, of which one replica gets 3 and the other one 2.

id = "keras/uneven_last_batch"
framework = "keras"
processes = 2
steps = 3
mode = "pair"
references = ["tensorflow/tensorflow#36224"]
tags = ["mirrored", "sgd"]

[wrong.mean_of_means]
title = "Keras divides by the number of examples of each replica"
place = { node = "loss", step = 2, ranks = "all", tensors = "all" }
"""

import os

import keras
import numpy as np
import tensorflow as tf

from cases import harness

BUG = os.environ.get("BUG", "")
DEVICES = int(os.environ.get("DEVICES", 1))
BATCH_SIZE, EXAMPLES = 12, 29


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


class Regression(keras.Sequential):
    def compute_loss(self, x, y, y_pred, sample_weight=None, training=True):
        if BUG == "mean_of_means":
            return keras.losses.MeanSquaredError()(y, y_pred, sample_weight)
        losses = tf.reduce_mean(tf.square(y - y_pred), axis=-1)
        count = tf.cast(tf.shape(y)[0], "float32")
        count = tf.distribute.get_replica_context().all_reduce("sum", count)
        return tf.reduce_sum(losses) / count


def main():
    strategy = make_strategy()
    keras.utils.set_random_seed(1)
    with strategy.scope():
        model = Regression(
            [keras.Input((6,)), keras.layers.Dense(8, "tanh"), keras.layers.Dense(2)]
        )
        model.compile(keras.optimizers.SGD(0.1))
    dataset = tf.data.Dataset.from_tensor_slices(get_data(EXAMPLES)).batch(BATCH_SIZE)
    with harness.training(model):
        model.fit(dataset, verbose=0)


if __name__ == "__main__":
    main()
