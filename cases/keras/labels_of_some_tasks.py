"""Examples have labels for some tasks only, and each task has the mean over the labels that it has.

id = "keras/labels_of_some_tasks"
framework = "keras"
processes = 2
steps = 2
mode = "pair"
references = ["keras-team/keras#3893", "open-mmlab/mmpretrain#631"]
date = "2016-09"
tags = ["mirrored", "loader", "adam"]

[wrong.labels_of_replica_are_counted]
title = "labels of a replica are counted"
place = { node = "loss", step = 0, ranks = "all", tensors = "all" }

[wrong.missing_labels_are_counted]
title = "missing labels are counted, too"
place = { node = "loss", step = 0, ranks = "all", tensors = "all" }

[wrong.tasks_share_a_count]
title = "tasks share a count"
place = { node = "loss", step = 0, ranks = "all", tensors = "all" }
"""

import os

import keras
import numpy as np
import tensorflow as tf

from cases import harness

BUG = os.environ.get("BUG", "")
DEVICES = int(os.environ.get("DEVICES", 1))
BATCH_SIZE, TASKS = 16, 3


def make_strategy():
    cpu = tf.config.list_physical_devices("CPU")[0]
    parts = [tf.config.LogicalDeviceConfiguration()] * DEVICES
    tf.config.set_logical_device_configuration(cpu, parts)
    return tf.distribute.MirroredStrategy(
        [f"CPU:{i}" for i in range(DEVICES)],
        cross_device_ops=tf.distribute.ReductionToOneDevice(),
    )


def get_examples():
    """Returns examples of which each task lacks some labels, as NaN."""
    random = np.random.default_rng(32)
    x = random.normal(size=(2 * BATCH_SIZE, 6)).astype("float32")
    y = np.sin(x[:, :TASKS] + x[:, TASKS:]).astype("float32")
    places = np.arange(len(x))[:, None] % BATCH_SIZE + np.array([0, 3, 6])
    y[random.uniform(size=y.shape) < places / 24] = np.nan
    return x, y


def compute_loss(outputs, labels):
    is_there = tf.math.is_finite(labels)
    errors = tf.where(is_there, tf.square(outputs - tf.where(is_there, labels, 0.0)), 0.0)
    counts = tf.reduce_sum(tf.cast(is_there, tf.float32), 0)
    replica = tf.distribute.get_replica_context()
    if BUG == "labels_of_replica_are_counted":
        counts *= replica.num_replicas_in_sync
    elif BUG == "missing_labels_are_counted":
        counts = tf.fill([TASKS], float(BATCH_SIZE))
    else:
        counts = replica.all_reduce("sum", counts)
    if BUG == "tasks_share_a_count":
        counts = tf.reduce_mean(counts, keepdims=True)
    return tf.reduce_sum(tf.reduce_sum(errors, 0) / counts) / TASKS


def main():
    strategy = make_strategy()
    keras.utils.set_random_seed(32)
    dataset = tf.data.Dataset.from_tensor_slices(get_examples()).batch(BATCH_SIZE)
    with strategy.scope():
        layers = [keras.layers.Dense(16, "tanh"), keras.layers.Dense(TASKS)]
        model = keras.Sequential([keras.Input((6,)), *layers])
        optimizer = keras.optimizers.Adam(0.02, epsilon=1e-3)
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
