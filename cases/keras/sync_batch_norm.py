"""BatchNorm of a detector is not synchronised over the replicas, whose batches are small.

id = "keras/sync_batch_norm"
framework = "keras"
processes = 2
steps = 2
mode = "pair"
references = ["google/automl#384", "tensorflow/tensorflow#7439"]
date = "2020-05"
tags = ["batch_norm", "mirrored", "sgd"]

[wrong.layer_is_not_synchronised]
title = "the layer is not synchronised"
place = { node = "outputs", step = 0, ranks = "all", tensors = [
    "batch_normalization",
    "batch_normalization_1",
] }

[wrong.one_of_two_layers_is_not_synchronised]
title = "one of two layers is not synchronised"
place = { node = "outputs", step = 0, ranks = "all", tensors = ["batch_normalization_1"] }
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


def batch_norm(number):
    local = BUG == "layer_is_not_synchronised"
    local |= BUG == "one_of_two_layers_is_not_synchronised" and number == 2
    return keras.layers.BatchNormalization(momentum=0.9, synchronized=not local)


def build_model():
    inputs = keras.Input((8, 8, 2))
    x = keras.layers.Conv2D(6, 3, strides=2, use_bias=False)(inputs)
    x = keras.layers.Activation("softplus")(batch_norm(1)(x))
    x = keras.layers.Conv2D(8, 2, use_bias=False)(x)
    x = keras.layers.Activation("softplus")(batch_norm(2)(x))
    return keras.Model(inputs, keras.layers.Dense(3)(keras.layers.Flatten()(x)))


def main():
    strategy = make_strategy()
    keras.utils.set_random_seed(1)
    random = np.random.default_rng(0)
    images = random.normal(size=(2 * BATCH_SIZE, 8, 8, 2)).astype("float32")
    images[BATCH_SIZE // 2 :: BATCH_SIZE] *= 3
    with strategy.scope():
        model = build_model()
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.SGD(0.1, momentum=0.9), loss)
    with harness.training(model):
        labels = images[:, 0, :3, 0].argmax(1)
        model.fit(images, labels, BATCH_SIZE, shuffle=False, verbose=0)


if __name__ == "__main__":
    main()
