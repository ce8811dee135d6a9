"""Gradients of two micro-batches are added; all losses are divided by the labels of the batch.

id = "keras/labels_of_micro_batches"
framework = "keras"
processes = 2
steps = 2
mode = "pair"
references = ["huggingface/transformers#34191"]
date = "2024-10"
tags = ["accumulation", "mirrored", "sgd"]

[wrong.own_labels]
title = "each micro-batch divides by its own labels"
place = { node = "loss", step = 0, ranks = "all", tensors = "all" }
"""

import os

import keras
import numpy as np
import tensorflow as tf

from cases import harness

BUG = os.environ.get("BUG", "")
DEVICES = int(os.environ.get("DEVICES", 1))
BATCH_SIZE, MICRO_BATCHES = 12, 2


def make_strategy():
    cpu = tf.config.list_physical_devices("CPU")[0]
    parts = [tf.config.LogicalDeviceConfiguration()] * DEVICES
    tf.config.set_logical_device_configuration(cpu, parts)
    return tf.distribute.MirroredStrategy(
        [f"CPU:{i}" for i in range(DEVICES)],
        cross_device_ops=tf.distribute.ReductionToOneDevice(),
    )


def get_data(num_examples):
    """Returns inputs, targets, and the number of labels of each example."""
    random = np.random.default_rng(0)
    x = random.normal(size=(num_examples, 6)).astype("float32")
    y = np.tanh(x @ random.normal(size=(6, 2))).astype("float32")
    return x, y, random.integers(1, 9, num_examples).astype("float32")


class Accumulates(keras.Sequential):
    def train_step(self, data):
        x, y, num_labels = data
        context = tf.distribute.get_replica_context()
        count = context.all_reduce("sum", tf.reduce_sum(num_labels))
        total = [tf.zeros(variable.shape) for variable in self.trainable_weights]
        for part in range(MICRO_BATCHES):
            mine = slice(part, None, MICRO_BATCHES)
            with tf.GradientTape() as tape:
                losses = tf.reduce_mean(tf.square(y[mine] - self(x[mine], training=True)), axis=-1)
                if BUG == "own_labels":
                    count = tf.reduce_sum(num_labels[mine]) * MICRO_BATCHES * DEVICES
                loss = tf.reduce_sum(losses * num_labels[mine]) / count
            gradients = tape.gradient(loss, self.trainable_weights)
            total = [a + b for a, b in zip(total, gradients, strict=True)]
        self.optimizer.apply(total, self.trainable_weights)
        return {"loss": loss}


def main():
    strategy = make_strategy()
    keras.utils.set_random_seed(1)
    with strategy.scope():
        model = Accumulates(
            [keras.Input((6,)), keras.layers.Dense(8, "tanh"), keras.layers.Dense(2)]
        )
        model.compile(keras.optimizers.SGD(0.1))
    dataset = tf.data.Dataset.from_tensor_slices(get_data(2 * BATCH_SIZE)).batch(BATCH_SIZE)
    with harness.training(model):
        model.fit(dataset, verbose=0)


if __name__ == "__main__":
    main()
