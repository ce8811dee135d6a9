"""The last batch has one example, and the second replica none: the mean over none is no number.

id = "keras/empty_shard"
framework = "keras"
processes = 2
steps = 3
mode = "pair"
references = ["tensorflow/tensorflow#52053"]
tags = ["mirrored", "sgd"]

[wrong.mean_over_own]
title = "a mean over the replica's examples, divided by the replicas"
place = { node = "loss", step = 2, ranks = "all", tensors = "all" }
"""

import os

import keras
import numpy as np
import tensorflow as tf

from cases import harness

BUG = os.environ.get("BUG", "")
DEVICES = int(os.environ.get("DEVICES", 1))
BATCH_SIZE, EXAMPLES = 12, 25


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


class OwnStep(keras.Sequential):
    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            losses = tf.reduce_mean(tf.square(y - self(x, training=True)), axis=-1)
            if BUG == "mean_over_own":
                loss = tf.reduce_mean(losses) / DEVICES
            else:
                count = tf.cast(tf.shape(losses)[0], "float32")
                count = tf.distribute.get_replica_context().all_reduce("sum", count)
                loss = tf.reduce_sum(losses) / count
        gradients = tape.gradient(loss, self.trainable_weights)
        self.optimizer.apply(gradients, self.trainable_weights)
        return {"loss": loss}


def main():
    strategy = make_strategy()
    keras.utils.set_random_seed(1)
    with strategy.scope():
        model = OwnStep([keras.Input((6,)), keras.layers.Dense(8, "tanh"), keras.layers.Dense(2)])
        model.compile(keras.optimizers.SGD(0.1))
    dataset = tf.data.Dataset.from_tensor_slices(get_data(EXAMPLES)).batch(BATCH_SIZE)
    with harness.training(model):
        model.fit(dataset, verbose=0)


if __name__ == "__main__":
    main()
