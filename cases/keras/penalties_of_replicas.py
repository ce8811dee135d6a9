"""A custom step adds the losses of regularisers, which each replica would add in full.

id = "keras/penalties_of_replicas"
framework = "keras"
processes = 2
steps = 2
mode = "pair"
references = ["tensorflow/tensorflow#58938"]
date = "2023-01"
tags = ["mirrored", "loader", "sgd"]

[wrong.regularisers_are_not_divided_by_replicas]
title = "regularisers are not divided by the replicas"
place = { node = "loss", step = 0, ranks = "all", tensors = ["dense/kernel", "dense_1/kernel"] }

[wrong.regularisers_are_left_out]
title = "regularisers are left out"
place = { node = "loss", step = 0, ranks = "all", tensors = ["dense/kernel", "dense_1/kernel"] }
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


def main():
    strategy = make_strategy()
    keras.utils.set_random_seed(6)
    random = np.random.default_rng(1)
    x = random.normal(size=(2 * BATCH_SIZE, 6)).astype("float32")
    y = np.eye(3, dtype="float32")[x[:, :3].argmax(1)]
    dataset = tf.data.Dataset.from_tensor_slices((x, y)).batch(BATCH_SIZE)
    dataset = strategy.experimental_distribute_dataset(dataset)
    with strategy.scope():
        model = keras.Sequential(
            [
                keras.Input((6,)),
                keras.layers.Dense(
                    12, "tanh", kernel_regularizer=keras.regularizers.L1L2(0.01, 0.1)
                ),
                keras.layers.Dense(3, kernel_regularizer=keras.regularizers.L2(0.1)),
            ]
        )
        optimizer = keras.optimizers.SGD(0.1, momentum=0.9)
        optimizer.build(model.trainable_variables)

    def compute_loss(labels, logits):
        losses = tf.nn.softmax_cross_entropy_with_logits(labels, logits)
        loss = tf.nn.compute_average_loss(losses, global_batch_size=BATCH_SIZE)
        if BUG == "regularisers_are_left_out":
            return loss
        penalty = tf.add_n(model.losses)
        if BUG != "regularisers_are_not_divided_by_replicas":
            penalty = tf.nn.scale_regularization_loss(penalty)
        return loss + penalty

    def step(batch):
        images, labels = batch
        with tf.GradientTape() as tape:
            loss = compute_loss(labels, model(images, training=True))
        grads = tape.gradient(loss, model.trainable_variables)
        optimizer.apply(grads, model.trainable_variables)
        return loss

    with harness.training(model, optimizer) as recorder:
        recorded_step = recorder.wrap(step)

        @tf.function
        def train_step(batch):
            strategy.run(recorded_step, args=(batch,))

        for batch in dataset:
            train_step(batch)


if __name__ == "__main__":
    main()
