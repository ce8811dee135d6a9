"""A training is interrupted in its first epoch; it skips the batches that it has trained on.

id = "keras/resume_skips_every_epoch"
framework = "keras"
processes = 2
steps = 4
mode = "pair"
references = ["huggingface/accelerate#1451"]
tags = ["mirrored", "sgd"]

[wrong.skips_in_later_epochs]
title = "batches are skipped in later epochs, too"
place = { node = "examples", step = 2, ranks = "all", tensors = "all" }
"""

import os

import keras
import numpy as np
import tensorflow as tf

from cases import harness

BUG = os.environ.get("BUG", "")
DEVICES = int(os.environ.get("DEVICES", 1))
BATCH_SIZE, EXAMPLES, EPOCHS, INTERRUPTED = 12, 24, 2, 1


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


def get_batches(epoch):
    x, y = get_data(EXAMPLES)
    order = np.random.default_rng(epoch).permutation(EXAMPLES)
    return tf.data.Dataset.from_tensor_slices((x[order], y[order])).batch(BATCH_SIZE)


def main():
    strategy = make_strategy()
    keras.utils.set_random_seed(1)
    with strategy.scope():
        model = keras.Sequential(
            [keras.Input((6,)), keras.layers.Dense(8, "tanh"), keras.layers.Dense(2)]
        )
        model.compile(keras.optimizers.SGD(0.1), "mse")
    with harness.training(model):
        model.fit(get_batches(0).take(INTERRUPTED), verbose=0)
        for epoch in range(EPOCHS):
            skips = epoch == 0 or BUG == "skips_in_later_epochs"
            model.fit(get_batches(epoch).skip(INTERRUPTED if skips else 0), verbose=0)


if __name__ == "__main__":
    main()
