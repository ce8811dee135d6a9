"""Gradients of an embedding's rows are put together by hand from two copies of the model.

id = "keras/sparse_rows"
framework = "keras"
processes = 2
steps = 2
mode = "pair"
references = ["tensorflow/tensorflow#53160", "tensorflow/recommenders#138"]
date = "2021-11"
tags = ["mirrored", "gathered", "embedding"]

[wrong.rows_that_both_copies_use_are_overwritten]
title = "rows that both copies use are overwritten"
place = { node = "sum", step = 0, ranks = "all", tensors = ["embedding/embeddings"] }

[wrong.rows_of_other_copy_are_left_out]
title = "rows of the other copy are left out"
place = { node = "sum", step = 0, ranks = "all", tensors = ["embedding/embeddings"] }

[wrong.rows_are_averaged_all_others_are_summed]
title = "rows are averaged, all others are summed"
place = { node = "sum", step = 0, ranks = "all", tensors = ["embedding/embeddings"] }
"""

import os

import keras
import numpy as np
import tensorflow as tf

from cases import harness

BUG = os.environ.get("BUG", "")
DEVICES = int(os.environ.get("DEVICES", 1))
BATCH_SIZE, WORDS, WIDTH = 12, 20, 8


def make_strategy():
    cpu = tf.config.list_physical_devices("CPU")[0]
    parts = [tf.config.LogicalDeviceConfiguration()] * DEVICES
    tf.config.set_logical_device_configuration(cpu, parts)
    return tf.distribute.MirroredStrategy(
        [f"CPU:{i}" for i in range(DEVICES)],
        cross_device_ops=tf.distribute.ReductionToOneDevice(),
    )


def build_model():
    keras.utils.set_random_seed(1)
    inputs = keras.Input((5,), dtype="int32")
    x = keras.layers.Embedding(WORDS, WIDTH)(inputs)
    x = keras.layers.GlobalAveragePooling1D()(x)
    return keras.Model(inputs, keras.layers.Dense(3)(keras.layers.Dense(12, "tanh")(x)))


def add_rows(parts):
    """Returns the sum of `tf.IndexedSlices` as a dense gradient."""
    total = tf.zeros((WORDS, WIDTH))
    if BUG == "rows_of_other_copy_are_left_out":
        parts = parts[:1]
    for part in parts:
        rows = tf.convert_to_tensor(part)
        if BUG == "rows_that_both_copies_use_are_overwritten":
            used = tf.unique(tf.reshape(part.indices, [-1])).y[:, None]
            total = tf.tensor_scatter_nd_update(total, used, tf.gather(rows, used[:, 0]))
        else:
            total += rows
    return total / len(parts) if BUG == "rows_are_averaged_all_others_are_summed" else total


def main():
    devices = make_strategy().extended.worker_devices
    copies = []
    for device in devices:
        with tf.device(device):
            copies.append(build_model())
    first, optimizer = copies[0], keras.optimizers.Adagrad(0.1, epsilon=1e-3)
    random = np.random.default_rng(0)
    words = random.integers(0, WORDS, (2 * BATCH_SIZE, 5)).astype("int32")
    labels = (words[:, 0] % 3).astype("int32")

    def step(words, labels):
        found = []
        shards = zip(tf.split(words, DEVICES), tf.split(labels, DEVICES), strict=True)
        for device, copy, (x, y) in zip(devices, copies, shards, strict=True):
            with tf.device(device):
                for weight, value in zip(copy.weights, first.weights, strict=True):
                    weight.assign(value)
                with tf.GradientTape() as tape:
                    logits = copy(x, training=True)
                    losses = tf.nn.sparse_softmax_cross_entropy_with_logits(y, logits)
                    loss = tf.reduce_sum(losses) / BATCH_SIZE
                found.append(tape.gradient(loss, copy.trainable_variables))
        rows, *others = zip(*found, strict=True)
        sums = [add_rows(rows), *map(tf.add_n, others)]
        optimizer.apply(sums, first.trainable_variables)

    with harness.training(first, optimizer) as recorder:
        train_step = tf.function(recorder.wrap(step))
        for start in (0, BATCH_SIZE):
            chosen = slice(start, start + BATCH_SIZE)
            train_step(tf.constant(words[chosen]), tf.constant(labels[chosen]))


if __name__ == "__main__":
    main()
