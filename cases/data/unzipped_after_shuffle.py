"""A data set of pairs is shuffled, taken apart into inputs and targets, and put together.

id = "data/unzipped_after_shuffle"
framework = "keras"
processes = 2
steps = 2
mode = "pair"
references = ["tensorflow/tensorflow#12851", "tensorflow/tensorflow#41334"]
date = "2018-10"
tags = ["mirrored", "sgd"]

[wrong.each_part_is_shuffled_again]
title = "each part is shuffled again"
place = { node = "examples", step = 0, ranks = "all", tensors = "all" }
"""

import os

import keras
import numpy as np
import tensorflow as tf

from cases import harness

BUG = os.environ.get("BUG", "")
DEVICES = int(os.environ.get("DEVICES", 1))
EXAMPLES, BATCH_SIZE = 48, 12


def make_strategy():
    cpu = tf.config.list_physical_devices("CPU")[0]
    parts = [tf.config.LogicalDeviceConfiguration()] * DEVICES
    tf.config.set_logical_device_configuration(cpu, parts)
    return tf.distribute.MirroredStrategy(
        [f"CPU:{i}" for i in range(DEVICES)],
        cross_device_ops=tf.distribute.ReductionToOneDevice(),
    )


def make_dataset():
    """Returns pairs whose inputs are scaled, and whose targets are counted from 1."""
    random = np.random.default_rng(4)
    x = random.normal(size=(EXAMPLES, 8)).astype("float32")
    y = np.sort(np.abs(x[:, :3]), 1).astype("float32")
    pairs = tf.data.Dataset.from_tensor_slices((x, y)).shuffle(EXAMPLES, seed=5)
    if BUG == "each_part_is_shuffled_again":
        # Each pass over the shuffled pairs has an order of its own.
        inputs, targets = pairs.map(lambda x, y: x / 2), pairs.map(lambda x, y: y + 1)
        pairs = tf.data.Dataset.zip((inputs, targets))
    else:
        pairs = pairs.map(lambda x, y: (x / 2, y + 1))
    return pairs.batch(BATCH_SIZE, drop_remainder=True).take(2)


def main():
    strategy = make_strategy()
    keras.utils.set_random_seed(3)
    with strategy.scope():
        layers = [keras.Input((8,)), keras.layers.Dense(20, "gelu"), keras.layers.Dense(3)]
        model = keras.Sequential(layers)
        model.compile(keras.optimizers.SGD(0.2, momentum=0.9), keras.losses.LogCosh())
    with harness.training(model):
        model.fit(make_dataset(), shuffle=False, verbose=0)


if __name__ == "__main__":
    main()
