"""The optimizer of Keras 3 sums the gradients of all replicas, which scripts of Keras 2 did too.

id = "keras/gradients_are_sums"
framework = "keras"
processes = 2
steps = 2
mode = "pair"
references = ["keras-team/keras#19308", "keras-team/keras#19467"]
date = "2024-03"
tags = ["mirrored", "loader", "sgd"]

[wrong.loss_is_mean_of_replica_examples]
title = "the loss is the mean of the replica's examples"
place = { node = "loss", step = 0, ranks = "all", tensors = "all" }

[wrong.gradients_are_summed_before_apply_gradients]
title = "gradients are summed before apply_gradients, too"
place = { node = "sum", step = 0, ranks = "all", tensors = "all" }
"""

import os

import keras
import numpy as np
import tensorflow as tf

from cases import harness

BUG = os.environ.get("BUG", "")
DEVICES = int(os.environ.get("DEVICES", 1))
BATCH_SIZE = 16


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
    keras.utils.set_random_seed(1)
    random = np.random.default_rng(0)
    x = random.normal(size=(2 * BATCH_SIZE, 8)).astype("float32")
    dataset = tf.data.Dataset.from_tensor_slices((x, x[:, :4].argmax(1))).batch(BATCH_SIZE)
    dataset = strategy.experimental_distribute_dataset(dataset)
    with strategy.scope():
        model = keras.Sequential(
            [keras.Input((8,)), keras.layers.Dense(16, "tanh"), keras.layers.Dense(4)]
        )
        optimizer = keras.optimizers.SGD(0.1, momentum=0.9)
    loss_of_each = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction=None)

    def replica_step(x, y):
        with tf.GradientTape() as tape:
            losses = loss_of_each(y, model(x, training=True))
            if BUG == "loss_is_mean_of_replica_examples":
                loss = tf.reduce_mean(losses)
            else:
                loss = tf.reduce_sum(losses) / BATCH_SIZE
        gradients = tape.gradient(loss, model.trainable_variables)
        if BUG == "gradients_are_summed_before_apply_gradients":
            gradients = tf.distribute.get_replica_context().all_reduce("sum", gradients)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))

    with harness.training(model, optimizer) as recorder:
        recorded = recorder.wrap(replica_step)

        @tf.function
        def train_step(x, y):
            strategy.run(recorded, args=(x, y))

        for x, y in dataset:
            train_step(x, y)


if __name__ == "__main__":
    main()
