"""The loss is the root of a mean over the whole batch, which is no mean of the roots of replicas.

id = "keras/root_of_errors"
framework = "keras"
processes = 2
steps = 2
mode = "pair"
references = ["Tudor67/Object-Counting#1", "chaoshangcs/GTS#7"]
date = "2019-03"
tags = ["mirrored", "loader", "sgd"]

[right.root_of_mean_of_means]
title = "the root is that of a mean of means"
patch = [["tf.reduce_sum(squares) / BATCH_SIZE", "tf.reduce_mean(squares) / replicas"]]

[wrong.root_is_that_of_replica]
title = "the root is that of a replica"
place = { node = "loss", step = 0, ranks = "all", tensors = "all" }

[wrong.root_is_not_divided_by_replicas]
title = "the root is not divided by the replicas"
place = { node = "loss", step = 0, ranks = "all", tensors = "all" }

[wrong.mean_has_no_gradient]
title = "the mean has no gradient"
place = { node = "gradient", step = 0, ranks = "all", tensors = "all" }
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


@tf.custom_gradient
def sum_over_replicas(value):
    """Adds over replicas; what comes from above is the same on all, and is added, too."""
    replica = tf.distribute.get_replica_context()
    return replica.all_reduce("sum", value), lambda above: replica.all_reduce("sum", above)


def compute_loss(outputs, labels):
    """Returns a replica's share of the root of the mean squared error of the batch."""
    squares = tf.square(outputs - labels)
    replicas = tf.distribute.get_strategy().num_replicas_in_sync
    if BUG == "root_is_that_of_replica":
        return tf.sqrt(tf.reduce_mean(squares)) / replicas
    mean = sum_over_replicas(tf.reduce_sum(squares) / BATCH_SIZE)
    if BUG == "mean_has_no_gradient":
        own = tf.reduce_mean(squares) / replicas
        mean = tf.stop_gradient(mean - own) + own
    if BUG == "root_is_not_divided_by_replicas":
        return tf.sqrt(mean)
    return tf.sqrt(mean) / replicas


def main():
    strategy = make_strategy()
    keras.utils.set_random_seed(34)
    random = np.random.default_rng(34)
    x = random.normal(size=(2 * BATCH_SIZE, 5)).astype("float32")
    x[np.arange(len(x)) % BATCH_SIZE < BATCH_SIZE // 2] *= 3
    dataset = tf.data.Dataset.from_tensor_slices((x, x.sum(1, keepdims=True))).batch(BATCH_SIZE)
    with strategy.scope():
        layers = [keras.layers.Dense(14, "selu"), keras.layers.Dense(1)]
        model = keras.Sequential([keras.Input((5,)), *layers])
        optimizer = keras.optimizers.SGD(0.1, momentum=0.9)
        optimizer.build(model.trainable_variables)

    def step(x, y):
        with tf.GradientTape() as tape:
            loss = compute_loss(model(x, training=True), y)
        weights = model.trainable_variables
        optimizer.apply(tape.gradient(loss, weights), weights)

    with harness.training(model, optimizer) as recorder:
        recorded = recorder.wrap(step)
        train_step = tf.function(lambda x, y: strategy.run(recorded, args=(x, y)))
        for batch in strategy.experimental_distribute_dataset(dataset):
            train_step(*batch)


if __name__ == "__main__":
    main()
