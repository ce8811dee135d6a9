"""A data set that is distributed over replicas has batches for all of them, not for one.

id = "data/size_for_all_replicas"
framework = "keras"
processes = 2
steps = 2
mode = "pair"
references = ["OpenNMT/OpenNMT-tf#540", "OpenNMT/OpenNMT-tf#542"]
date = "2019-11"
tags = ["mirrored", "loader", "embedding", "adam"]

[wrong.batches_have_size_for_replica]
title = "batches have the size for a replica"
place = { node = "examples", step = 0, ranks = "all", tensors = "all" }

[wrong.each_replica_has_batch_of_size_for_all]
title = "each replica has a batch of the size for all"
place = { node = "examples", step = 0, ranks = "all", tensors = "all" }
"""

import os

import keras
import numpy as np
import tensorflow as tf

from cases import harness

BUG = os.environ.get("BUG", "")
DEVICES = int(os.environ.get("DEVICES", 1))
BATCH_SIZE, STEPS, LENGTH, WORDS = 16, 2, 5, 14


def make_strategy():
    cpu = tf.config.list_physical_devices("CPU")[0]
    parts = [tf.config.LogicalDeviceConfiguration()] * DEVICES
    tf.config.set_logical_device_configuration(cpu, parts)
    return tf.distribute.MirroredStrategy(
        [f"CPU:{i}" for i in range(DEVICES)],
        cross_device_ops=tf.distribute.ReductionToOneDevice(),
    )


def make_dataset():
    random = np.random.default_rng(4)
    tokens = random.integers(WORDS, size=(DEVICES * STEPS * BATCH_SIZE, LENGTH)).astype("int32")
    return tf.data.Dataset.from_tensor_slices((tokens, (tokens.max(1) % 5).astype("float32")))


def distribute(strategy, dataset):
    if BUG == "each_replica_has_batch_of_size_for_all":
        return strategy.distribute_datasets_from_function(lambda context: dataset.batch(BATCH_SIZE))
    size = BATCH_SIZE // DEVICES if BUG == "batches_have_size_for_replica" else BATCH_SIZE
    return strategy.experimental_distribute_dataset(dataset.batch(size))


def main():
    strategy = make_strategy()
    keras.utils.set_random_seed(9)
    with strategy.scope():
        layers = [keras.Input((LENGTH,), dtype="int32"), keras.layers.Embedding(WORDS, 6)]
        layers += [keras.layers.Flatten(), keras.layers.Dense(12, "elu"), keras.layers.Dense(1)]
        model = keras.Sequential(layers)
        optimizer = keras.optimizers.Adamax(0.02, epsilon=1e-3)

    def replica_step(tokens, targets):
        context = tf.distribute.get_replica_context()
        number = context.all_reduce("sum", tf.cast(tf.shape(tokens)[0], tf.float32))
        with tf.GradientTape() as tape:
            outputs = model(tokens, training=True)
            losses = tf.math.log(tf.math.cosh(outputs[:, 0] - targets))
            loss = tf.reduce_sum(losses) / number
        weights = model.trainable_variables
        gradients = [tf.convert_to_tensor(each) for each in tape.gradient(loss, weights)]
        optimizer.apply(gradients, weights)

    with harness.training(model, optimizer) as recorder:
        recorded = recorder.wrap(replica_step)

        @tf.function
        def train_step(tokens, targets):
            strategy.run(recorded, args=(tokens, targets))

        batches = iter(distribute(strategy, make_dataset()))
        for _ in range(STEPS):
            train_step(*next(batches))


if __name__ == "__main__":
    main()
