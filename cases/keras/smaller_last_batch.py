"""The last batch is smaller, and its losses are divided by the usual batch size.

id = "keras/smaller_last_batch"
framework = "keras"
processes = 2
steps = 2
mode = "pair"
references = ["huggingface/transformers#6969", "huggingface/transformers#6998"]
date = "2020-09"
tags = ["mirrored", "loader", "recurrent", "embedding", "sgd"]

[wrong.divided_by_usual_batch_size]
title = "divided by the usual batch size"
place = { node = "loss", step = 1, ranks = "all", tensors = "all" }

[wrong.mean_on_each_replica_divided_by_replicas]
title = "a mean on each replica, divided by the replicas"
place = { node = "loss", step = 1, ranks = "all", tensors = "all" }
"""

import os

import keras
import numpy as np
import tensorflow as tf

from cases import harness

BUG = os.environ.get("BUG", "")
DEVICES = int(os.environ.get("DEVICES", 1))
BATCH_SIZE, EXAMPLES = 12, 19


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
    keras.utils.set_random_seed(2)
    random = np.random.default_rng(0)
    tokens = random.integers(0, 30, (EXAMPLES, 7))
    labels = tokens[:, 0] % 3
    dataset = tf.data.Dataset.from_tensor_slices((tokens, labels)).batch(BATCH_SIZE)
    with strategy.scope():
        model = keras.Sequential(
            [
                keras.Input((7,), dtype="int32"),
                keras.layers.Embedding(30, 8),
                keras.layers.GRU(10),
                keras.layers.Dense(3),
            ]
        )
        optimizer = keras.optimizers.SGD(0.5)

    def replica_step(tokens, labels, size):
        with tf.GradientTape() as tape:
            logits = model(tokens, training=True)
            losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits)
            if BUG == "divided_by_usual_batch_size":
                loss = tf.reduce_sum(losses) / BATCH_SIZE
            elif BUG == "mean_on_each_replica_divided_by_replicas":
                loss = tf.reduce_mean(losses) / DEVICES
            else:
                loss = tf.reduce_sum(losses) / size
        weights = model.trainable_variables
        optimizer.apply(tape.gradient(loss, weights), weights)

    with harness.training(model, optimizer) as recorder:
        recorded = recorder.wrap(lambda tokens, labels: replica_step(tokens, labels, size))
        for tokens, labels in strategy.experimental_distribute_dataset(dataset):
            parts = strategy.experimental_local_results(labels)
            size = sum(len(part) for part in parts)
            tf.function(lambda *batch: strategy.run(recorded, args=batch))(tokens, labels)


if __name__ == "__main__":
    main()
