"""Regularisation losses are computed on each replica, and their gradients are summed.

id = "keras/regularisers_per_replica"
framework = "keras"
processes = 2
steps = 2
mode = "pair"
references = ["keras-team/keras#19891", "keras-team/keras#20609", "tensorflow/tensorflow#48875"]
date = "2024-06"
tags = ["mirrored", "loader", "adam"]

[wrong.penalty_of_each_replica_counts_in_full]
title = "the penalty of each replica counts in full"
place = { node = "loss", step = 0, ranks = "all", tensors = ["conv2d/kernel", "dense/kernel"] }

[wrong.model_losses_is_left_out]
title = "model.losses is left out"
place = { node = "loss", step = 0, ranks = "all", tensors = ["conv2d/kernel", "dense/kernel"] }
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
    penalty = keras.regularizers.L1L2(0.01, 0.05)
    inputs = keras.Input((8, 8, 1))
    x = keras.layers.Conv2D(6, 3, activation="relu", kernel_regularizer=penalty)(inputs)
    x = keras.layers.GlobalAveragePooling2D()(x)
    x = keras.layers.Dense(10, "tanh", kernel_regularizer=keras.regularizers.L2(0.05))(x)
    return keras.Model(inputs, keras.layers.Dense(3)(x))


def main():
    strategy = make_strategy()
    keras.utils.set_random_seed(1)
    random = np.random.default_rng(0)
    images = random.normal(size=(2 * BATCH_SIZE, 8, 8, 1)).astype("float32")
    labels = images[:, 0, :3, 0].argmax(1)
    dataset = tf.data.Dataset.from_tensor_slices((images, labels)).batch(BATCH_SIZE)
    with strategy.scope():
        model, optimizer = build_model(), keras.optimizers.Adam(0.01, epsilon=1e-3)
        cross_entropy = keras.losses.SparseCategoricalCrossentropy(True, reduction="none")

    def replica_step(images, labels):
        with tf.GradientTape() as tape:
            losses = cross_entropy(labels, model(images, training=True))
            loss = tf.nn.compute_average_loss(losses, global_batch_size=BATCH_SIZE)
            penalty = tf.add_n(model.losses)
            if BUG == "penalty_of_each_replica_counts_in_full":
                loss += penalty
            elif BUG != "model_losses_is_left_out":
                loss += tf.nn.scale_regularization_loss(penalty)
        weights = model.trainable_variables
        optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))

    with harness.training(model, optimizer) as recorder:
        recorded = recorder.wrap(replica_step)

        @tf.function
        def train_step(batch):
            strategy.run(recorded, args=batch)

        for batch in strategy.experimental_distribute_dataset(dataset):
            train_step(batch)


if __name__ == "__main__":
    main()
