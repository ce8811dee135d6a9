"""The concordance of predictions with ratings is that of a batch, and no mean over examples.

id = "gathered/concordance"
framework = "keras"
processes = 2
steps = 2
mode = "pair"
references = ["lucidrains/enformer-pytorch#9", "autrainer/autrainer#123"]
date = "2022-07"
tags = ["mirrored", "loader", "sgd"]

[wrong.concordance_of_replica_predictions]
title = "concordance of the replica's predictions"
place = { node = "loss", step = 0, ranks = "all", tensors = "all" }

[wrong.loss_is_not_divided_by_replicas]
title = "the loss is not divided by the replicas"
place = { node = "loss", step = 0, ranks = "all", tensors = "all" }

[wrong.deviations_are_taken_for_variances]
title = "deviations are taken for variances"
place = { node = "loss", step = 0, ranks = "all", tensors = "all" }
"""

import os

import keras
import numpy as np
import tensorflow as tf

from cases import harness

BUG = os.environ.get("BUG", "")
DEVICES = int(os.environ.get("DEVICES", 1))
BATCH_SIZE, TASKS = 16, 2


def make_strategy():
    cpu = tf.config.list_physical_devices("CPU")[0]
    parts = [tf.config.LogicalDeviceConfiguration()] * DEVICES
    tf.config.set_logical_device_configuration(cpu, parts)
    return tf.distribute.MirroredStrategy(
        [f"CPU:{i}" for i in range(DEVICES)],
        cross_device_ops=tf.distribute.ReductionToOneDevice(),
    )


def mean(x):
    """Returns the mean over the examples of all replicas, with its gradient."""
    if DEVICES == 1 or BUG == "concordance_of_replica_predictions":
        return tf.reduce_mean(x, 0)
    total = tf.reduce_sum(x, 0)
    return tf.distribute.get_replica_context().all_reduce("SUM", total) / BATCH_SIZE


def loss_of(ratings, predictions):
    """Returns one loss for all examples: 1 minus the mean concordance of the tasks."""
    means = mean(predictions), mean(ratings)
    first, second = predictions - means[0], ratings - means[1]
    spreads = mean(first**2), mean(second**2)
    if BUG == "deviations_are_taken_for_variances":
        spreads = [tf.sqrt(each + 1e-6) for each in spreads]
    distance = (means[0] - means[1]) ** 2
    concordance = 2 * mean(first * second) / (spreads[0] + spreads[1] + distance)
    return 1 - tf.reduce_mean(concordance)


def main():
    strategy = make_strategy()
    keras.utils.set_random_seed(5)
    random = np.random.default_rng(6)
    x = random.normal(size=(2 * BATCH_SIZE, 7)).astype("float32")
    x[np.arange(len(x)) % BATCH_SIZE < BATCH_SIZE // 2] += 1
    ratings = np.tanh(x[:, :TASKS] + x[:, 2:3])
    with strategy.scope():
        layers = [keras.Input((7,)), keras.layers.Dense(16, "swish"), keras.layers.Dense(TASKS)]
        model = keras.Sequential(layers)
        optimizer = keras.optimizers.SGD(0.3, momentum=0.9)

    def replica_step(x, y):
        with tf.GradientTape() as tape:
            loss = loss_of(y, model(x, training=True))
            if BUG != "loss_is_not_divided_by_replicas":
                loss = loss / DEVICES
        weights = model.trainable_variables
        optimizer.apply(tape.gradient(loss, weights), weights)

    with harness.training(model, optimizer) as recorder:
        recorded = recorder.wrap(replica_step)
        train_step = tf.function(lambda x, y: strategy.run(recorded, args=(x, y)))
        dataset = tf.data.Dataset.from_tensor_slices((x, ratings)).batch(BATCH_SIZE)
        for batch in strategy.experimental_distribute_dataset(dataset):
            train_step(*batch)


if __name__ == "__main__":
    main()
