"""A counter of steps within the replicas' function counts each replica, and the rate follows it.

id = "keras/counter_per_replica"
framework = "keras"
processes = 2
steps = 2
mode = "pair"
references = ["keras-team/keras#20698", "horovod/horovod#1095"]
date = "2024-12"
tags = ["mirrored", "loader", "sgd"]

[wrong.each_replica_counts_step]
title = "each replica counts the step"
place = { node = "update", step = 1, ranks = "all", tensors = "all" }

[wrong.rate_is_multiplied_by_replicas_too]
title = "the rate is multiplied by the replicas, too"
place = { node = "update", step = 0, ranks = "all", tensors = "all" }
"""

import os

import keras
import numpy as np
import tensorflow as tf

from cases import harness

BUG = os.environ.get("BUG", "")
DEVICES = int(os.environ.get("DEVICES", 1))
BATCH_SIZE, FIRST, DECAY = 12, 0.1, 0.6


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
    x = random.normal(size=(2 * BATCH_SIZE, 5)).astype("float32")
    y = np.tanh(2 * x[:, 1:3])
    each = BUG == "each_replica_counts_step"
    Aggregation = tf.VariableAggregation
    with strategy.scope():
        model = keras.Sequential(
            [keras.Input((5,)), keras.layers.Dense(14, "elu"), keras.layers.Dense(2)]
        )
        optimizer = keras.optimizers.SGD(FIRST, momentum=0.9)
        counter = tf.Variable(
            0.0, aggregation=Aggregation.SUM if each else Aggregation.ONLY_FIRST_REPLICA
        )
    first = FIRST * (DEVICES if BUG == "rate_is_multiplied_by_replicas_too" else 1)

    def replica_step(x, y):
        with tf.GradientTape() as tape:
            errors = tf.reduce_mean(tf.square(model(x, training=True) - y), -1)
            loss = tf.nn.compute_average_loss(errors, global_batch_size=BATCH_SIZE)
        weights = model.trainable_variables
        optimizer.apply(tape.gradient(loss, weights), weights)
        counter.assign_add(tf.ones_like(loss))

    with harness.training(model, optimizer) as recorder:
        recorded = recorder.wrap(replica_step)
        train_step = tf.function(lambda x, y: strategy.run(recorded, args=(x, y)))
        dataset = tf.data.Dataset.from_tensor_slices((x, y)).batch(BATCH_SIZE)
        for x, y in strategy.experimental_distribute_dataset(dataset):
            optimizer.learning_rate.assign(first * DECAY ** counter.numpy())
            train_step(x, y)


if __name__ == "__main__":
    main()
