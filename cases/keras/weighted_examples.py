"""Weighted losses are divided by the weights of the replica's examples, not of the batch.

id = "keras/weighted_examples"
framework = "keras"
processes = 2
steps = 2
mode = "pair"
references = ["tensorflow/tensorflow#23767", "tensorflow/tensorflow#24226"]
date = "2018-11"
tags = ["mirrored", "sgd"]

[wrong.divided_by_sum_of_replica_weights]
title = "divided by the sum of the replica's weights"
place = { node = "loss", step = 0, ranks = "all", tensors = "all" }

[wrong.sum_that_is_not_divided_by_batch]
title = "a sum that is not divided by the batch"
place = { node = "loss", step = 0, ranks = "all", tensors = "all" }
"""

import os

import keras
import numpy as np
import tensorflow as tf

from cases import harness

BUG = os.environ.get("BUG", "")
DEVICES = int(os.environ.get("DEVICES", 1))
BATCH_SIZE = 12
CLASS_WEIGHTS = np.array([0.5, 1.0, 4.0], np.float32)


def make_strategy():
    cpu = tf.config.list_physical_devices("CPU")[0]
    parts = [tf.config.LogicalDeviceConfiguration()] * DEVICES
    tf.config.set_logical_device_configuration(cpu, parts)
    return tf.distribute.MirroredStrategy(
        [f"CPU:{i}" for i in range(DEVICES)],
        cross_device_ops=tf.distribute.ReductionToOneDevice(),
    )


def main():
    strategy = make_strategy()
    keras.utils.set_random_seed(4)
    random = np.random.default_rng(0)
    x = random.normal(size=(2 * BATCH_SIZE, 6)).astype("float32")
    y = x[:, :3].argmax(1)
    y[BATCH_SIZE // 2 : BATCH_SIZE] = 2
    weights = CLASS_WEIGHTS[y].reshape(2, BATCH_SIZE)
    weights = (weights / weights.mean(1, keepdims=True)).reshape(-1)  # 1 on average in a batch.
    reduction = {
        "divided_by_sum_of_replica_weights": "mean_with_sample_weight",
        "sum_that_is_not_divided_by_batch": "sum",
    }
    with strategy.scope():
        model = keras.Sequential(
            [
                keras.Input((6,)),
                keras.layers.Dense(16, "gelu"),
                keras.layers.Dense(3),
            ]
        )
        model.compile(
            keras.optimizers.SGD(0.1, momentum=0.5),
            keras.losses.SparseCategoricalCrossentropy(
                from_logits=True, reduction=reduction.get(BUG, "sum_over_batch_size")
            ),
        )
    with harness.training(model):
        model.fit(x, y, BATCH_SIZE, sample_weight=weights, shuffle=False, verbose=0)


if __name__ == "__main__":
    main()
