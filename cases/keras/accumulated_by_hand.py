"""Gradients of micro-batches are accumulated on each replica and applied once.

id = "keras/accumulated_by_hand"
framework = "keras"
processes = 2
steps = 2
mode = "pair"
references = ["keras-team/keras#17429", "keras-team/keras#19990", "keras-team/keras#19998"]
date = "2023-01"
tags = ["accumulation", "mirrored", "loader", "sgd"]

[wrong.micro_batches_are_added_not_averaged]
title = "micro-batches are added, not averaged"
place = { node = "loss", step = 0, ranks = "all", tensors = "all" }

[wrong.each_micro_batch_gradients_are_clipped]
title = "each micro-batch's gradients are clipped"
place = { node = "gradient", step = 0, ranks = "all", tensors = "all" }

[wrong.last_micro_batch_is_not_accumulated]
title = "the last micro-batch is not accumulated"
place = { node = "examples", step = 0, ranks = "all", tensors = "all" }
"""

import os

import keras
import numpy as np
import tensorflow as tf

from cases import harness

BUG = os.environ.get("BUG", "")
DEVICES = int(os.environ.get("DEVICES", 1))
BATCH_SIZE, MICRO_BATCHES, LARGEST = 16, 4, 0.02


def make_strategy():
    cpu = tf.config.list_physical_devices("CPU")[0]
    parts = [tf.config.LogicalDeviceConfiguration()] * DEVICES
    tf.config.set_logical_device_configuration(cpu, parts)
    return tf.distribute.MirroredStrategy(
        [f"CPU:{i}" for i in range(DEVICES)],
        cross_device_ops=tf.distribute.ReductionToOneDevice(),
    )


def build_model():
    inputs = keras.Input((6, 4))
    x = keras.layers.Conv1D(8, 3, padding="same", activation="tanh")(inputs)
    x = keras.layers.LayerNormalization()(x)
    return keras.Model(inputs, keras.layers.Dense(2)(keras.layers.Flatten()(x)))


def clip(gradients):
    return [tf.clip_by_value(g, -LARGEST, LARGEST) for g in gradients]


def main():
    strategy = make_strategy()
    keras.utils.set_random_seed(5)
    random = np.random.default_rng(0)
    x = random.normal(size=(2 * BATCH_SIZE, 6, 4)).astype("float32")
    y = np.cos(x[:, 0, :2])
    with strategy.scope():
        model, optimizer = build_model(), keras.optimizers.SGD(1.0)

    def replica_step(x, y):
        weights = model.trainable_variables
        total = [tf.zeros_like(weight) for weight in weights]
        size = BATCH_SIZE / (1 if BUG != "micro_batches_are_added_not_averaged" else MICRO_BATCHES)
        parts = [*zip(tf.split(x, MICRO_BATCHES), tf.split(y, MICRO_BATCHES), strict=True)]
        if BUG == "last_micro_batch_is_not_accumulated":
            parts, size = parts[:-1], BATCH_SIZE * (MICRO_BATCHES - 1) / MICRO_BATCHES
        for part, target in parts:
            with tf.GradientTape() as tape:
                errors = tf.reduce_mean(tf.square(model(part, training=True) - target), -1)
                loss = tf.reduce_sum(errors) / size
            found = tape.gradient(loss, weights)
            if BUG == "each_micro_batch_gradients_are_clipped":
                found = clip(found)
            total = [a + b for a, b in zip(total, found, strict=True)]
        context = tf.distribute.get_replica_context()
        total = context.all_reduce("sum", total)
        if BUG != "each_micro_batch_gradients_are_clipped":
            total = clip(total)
        optimizer.apply([g / context.num_replicas_in_sync for g in total], weights)

    dataset = tf.data.Dataset.from_tensor_slices((x, y)).batch(BATCH_SIZE)
    with harness.training(model, optimizer) as recorder:
        recorded = recorder.wrap(replica_step)
        train_step = tf.function(lambda x, y: strategy.run(recorded, args=(x, y)))
        for x, y in strategy.experimental_distribute_dataset(dataset):
            train_step(x, y)


if __name__ == "__main__":
    main()
