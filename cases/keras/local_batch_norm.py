"""BatchNorm normalises with the statistics of the whole batch, not of each replica's few images.

id = "keras/local_batch_norm"
framework = "keras"
processes = 2
steps = 2
mode = "pair"
references = ["tensorflow/tensorflow#7439"]
tags = ["batch_norm", "mirrored", "sgd"]

[wrong.not_synchronised]
title = "BatchNorm is not synchronised"
place = { node = "outputs", step = 0, ranks = "all", tensors = ["batch_normalization"] }
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


def build_model():
    return keras.Sequential(
        [
            keras.Input((8, 8, 3)),
            keras.layers.Conv2D(8, 3, use_bias=False),
            keras.layers.BatchNormalization(synchronized=BUG != "not_synchronised"),
            keras.layers.ReLU(),
            keras.layers.GlobalAveragePooling2D(),
            keras.layers.Dense(4),
        ]
    )


def main():
    strategy = make_strategy()
    keras.utils.set_random_seed(1)
    random = np.random.default_rng(0)
    images = random.normal(size=(2 * BATCH_SIZE, 8, 8, 3)).astype("float32")
    labels = random.integers(0, 4, len(images))
    with strategy.scope():
        model = build_model()
        model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    dataset = tf.data.Dataset.from_tensor_slices((images, labels)).batch(BATCH_SIZE)
    with harness.training(model):
        model.fit(dataset, verbose=0)


if __name__ == "__main__":
    main()
