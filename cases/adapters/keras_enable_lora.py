"""Keras layers with `enable_lora` in a custom loop: the loss of a replica, and what is trained.

id = "adapters/keras_enable_lora"
framework = "keras"
processes = 2
steps = 2
mode = "pair"
references = ["keras-team/keras#20609", "keras-team/keras#19496"]
date = "2024-12"
tags = ["mirrored", "loader", "lora", "adam"]

[wrong.loss_is_averaged_over_replica]
title = "the loss is averaged over a replica"
place = { node = "loss", step = 0, ranks = "all", tensors = "all" }

[wrong.head_is_trained_too]
title = "the head is trained, too"
place = { node = "start", step = 0, ranks = "all", tensors = ["head.kernel", "head.bias"] }

[wrong.alpha_is_not_divided_by_rank]
title = "alpha is not divided by the rank"
place = { node = "outputs", step = 0, ranks = "all", tensors = ["hidden"] }
"""

import os

import keras
import numpy as np
import tensorflow as tf

from cases import harness

BUG = os.environ.get("BUG", "")
DEVICES = int(os.environ.get("DEVICES", 1))
GLOBAL_BATCH_SIZE, RANK = 12, 2


def create_strategy():
    cpu = tf.config.list_physical_devices("CPU")[0]
    devices = [tf.config.LogicalDeviceConfiguration()] * DEVICES
    tf.config.set_logical_device_configuration(cpu, devices)
    return tf.distribute.MirroredStrategy(
        [f"CPU:{index}" for index in range(DEVICES)],
        cross_device_ops=tf.distribute.ReductionToOneDevice(),
    )


def create_model():
    keras.utils.set_random_seed(0)
    hidden = keras.layers.Dense(10, activation="tanh", name="hidden")
    head = keras.layers.Dense(3, name="head")
    model = keras.Sequential([keras.Input((6,)), hidden, head])
    head.trainable = BUG == "head_is_trained_too"
    alpha = RANK * RANK if BUG == "alpha_is_not_divided_by_rank" else RANK
    hidden.enable_lora(RANK, lora_alpha=alpha, b_initializer="glorot_uniform")
    return model


def create_dataset():
    x = np.random.default_rng(0).normal(size=(2 * GLOBAL_BATCH_SIZE, 6)).astype("float32")
    return tf.data.Dataset.from_tensor_slices((x, x[:, :3].argmax(1))).batch(GLOBAL_BATCH_SIZE)


def main():
    strategy = create_strategy()
    dataset = strategy.experimental_distribute_dataset(create_dataset())
    with strategy.scope():
        model = create_model()
        optimizer = keras.optimizers.Adam(0.02, epsilon=1e-3)
        optimizer.build(model.trainable_variables)
    loss_object = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction=None)

    def replica_step(images, labels):
        with tf.GradientTape() as tape:
            losses = loss_object(labels, model(images, training=True))
            if BUG == "loss_is_averaged_over_replica":
                loss = tf.reduce_mean(losses)
            else:
                loss = tf.reduce_sum(losses) / GLOBAL_BATCH_SIZE
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))

    with harness.training(model, optimizer) as recorder:
        recorded_step = recorder.wrap(replica_step)

        @tf.function
        def train_step(images, labels):
            strategy.run(recorded_step, args=(images, labels))

        for images, labels in dataset:
            train_step(images, labels)


if __name__ == "__main__":
    main()
