"""Each prediction has to find its own target among the targets of the whole batch.

id = "keras/local_negatives"
framework = "keras"
processes = 2
steps = 2
mode = "pair"
references = ["Spijkervet/SimCLR#13"]
tags = ["mirrored", "gathered", "sgd"]

[wrong.own_targets]
title = "the targets of the own replica alone are compared"
place = { node = "loss", step = 0, ranks = "all", tensors = "all" }
"""

import os

import keras
import numpy as np
import tensorflow as tf

from cases import harness

BUG = os.environ.get("BUG", "")
DEVICES = int(os.environ.get("DEVICES", 1))
BATCH_SIZE, TEMPERATURE = 12, 0.5


def make_strategy():
    cpu = tf.config.list_physical_devices("CPU")[0]
    parts = [tf.config.LogicalDeviceConfiguration()] * DEVICES
    tf.config.set_logical_device_configuration(cpu, parts)
    return tf.distribute.MirroredStrategy(
        [f"CPU:{i}" for i in range(DEVICES)],
        cross_device_ops=tf.distribute.ReductionToOneDevice(),
    )


def get_data(num_examples):
    random = np.random.default_rng(0)
    x = random.normal(size=(num_examples, 6)).astype("float32")
    return x, np.tanh(x @ random.normal(size=(6, 2))).astype("float32")


class FindsItsTarget(keras.Sequential):
    def compute_loss(self, x, y, y_pred, sample_weight=None, training=True):
        context = tf.distribute.get_replica_context()
        targets, first = y, 0
        if BUG != "own_targets" and DEVICES > 1:
            targets = context.all_gather(y, axis=0)
            first = context.replica_id_in_sync_group * tf.shape(y)[0]
        similarities = tf.matmul(y_pred, targets, transpose_b=True) / TEMPERATURE
        own = first + tf.range(tf.shape(y)[0])
        losses = tf.nn.sparse_softmax_cross_entropy_with_logits(own, similarities)
        return tf.reduce_sum(losses) / BATCH_SIZE


def main():
    strategy = make_strategy()
    keras.utils.set_random_seed(1)
    with strategy.scope():
        model = FindsItsTarget(
            [keras.Input((6,)), keras.layers.Dense(8, "tanh"), keras.layers.Dense(2)]
        )
        model.compile(keras.optimizers.SGD(0.1))
    dataset = tf.data.Dataset.from_tensor_slices(get_data(2 * BATCH_SIZE)).batch(BATCH_SIZE)
    with harness.training(model):
        model.fit(dataset, verbose=0)


if __name__ == "__main__":
    main()
