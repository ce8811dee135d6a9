"""Two workers of a data loader add noise to their examples, from NumPy's generator.

id = "keras/equal_augmentation"
framework = "keras"
processes = 2
steps = 2
mode = "pair"
references = ["pytorch/pytorch#5059"]
tags = ["mirrored", "sgd"]

[wrong.inherited_generator]
title = "both workers inherit the state of one generator"
place = { node = "random", step = 0, ranks = [1], tensors = "all" }
"""

import os

import keras
import numpy as np
import tensorflow as tf

from cases import harness

BUG = os.environ.get("BUG", "")
DEVICES = int(os.environ.get("DEVICES", 1))
BATCH_SIZE, STEPS, WORKERS = 12, 2, 2


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


def draw_noise(worker):
    """Returns the noise that a worker adds to its part of each batch."""
    random = np.random.default_rng(0 if BUG == "inherited_generator" else worker)
    return random.normal(0, 0.3, (STEPS, BATCH_SIZE // WORKERS, 6)).astype("float32")


def main():
    strategy = make_strategy()
    keras.utils.set_random_seed(1)
    with strategy.scope():
        model = keras.Sequential(
            [keras.Input((6,)), keras.layers.Dense(8, "tanh"), keras.layers.Dense(2)]
        )
        model.compile(keras.optimizers.SGD(0.1), "mse")
    x, y = get_data(STEPS * BATCH_SIZE)
    x += np.stack([draw_noise(worker) for worker in range(WORKERS)], axis=1).reshape(x.shape)
    dataset = tf.data.Dataset.from_tensor_slices((x, y)).batch(BATCH_SIZE)
    with harness.training(model):
        model.fit(dataset, verbose=0)


if __name__ == "__main__":
    main()
