"""The sums of gradients are sent while others are computed, and read when they have arrived.

id = "keras/stale_bucket"
framework = "keras"
processes = 2
steps = 3
mode = "pair"
references = ["deepspeedai/DeepSpeed#5294"]
tags = ["mirrored", "sgd"]

[wrong.read_too_early]
title = "a bucket still has the sum of the step before"
place = { node = "sum", step = 1, ranks = "all", tensors = ["dense/kernel"] }
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


class Overlapping(keras.optimizers.SGD):
    """Has the sum of the first weight's gradients in a bucket."""

    def build(self, variables):
        super().build(variables)
        first = tf.VariableAggregation.ONLY_FIRST_REPLICA
        zeros = tf.zeros(variables[0].shape)
        self.bucket = tf.Variable(zeros, trainable=False, aggregation=first)

    def _all_reduce_sum_gradients(self, grads_and_vars):
        (summed, variable), *others = super()._all_reduce_sum_gradients(grads_and_vars)
        if BUG == "read_too_early":
            arrived = tf.where(tf.equal(self.iterations.value, 0), summed, self.bucket)
            self.bucket.assign(summed)
            summed = arrived
        return [(summed, variable), *others]


def main():
    strategy = make_strategy()
    keras.utils.set_random_seed(1)
    with strategy.scope():
        model = keras.Sequential(
            [keras.Input((6,)), keras.layers.Dense(8, "tanh"), keras.layers.Dense(2)]
        )
        model.compile(Overlapping(0.1), "mse")
    dataset = tf.data.Dataset.from_tensor_slices(get_data(3 * BATCH_SIZE)).batch(BATCH_SIZE)
    with harness.training(model):
        model.fit(dataset, verbose=0)


if __name__ == "__main__":
    main()
