"""A synchronised BatchNorm corrects the variance that it keeps by n / (n - 1) of the whole batch.

id = "keras/sync_batch_norm_count"
framework = "keras"
processes = 2
steps = 2
mode = "pair"
references = ["pytorch/pytorch#22192"]
tags = ["batch_norm", "mirrored", "sgd"]

[wrong.count_of_replica]
title = "n is the number of examples of the replica"
place = { node = "update", step = 0, ranks = "all", tensors = ["*/moving_variance"] }
"""

import os

import keras
import numpy as np
import tensorflow as tf

from cases import harness

BUG = os.environ.get("BUG", "")
DEVICES = int(os.environ.get("DEVICES", 1))
BATCH_SIZE, EXAMPLES = 12, 21


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


class Unbiased(keras.layers.BatchNormalization):
    def call(self, inputs, training=False, mask=None):
        before = tf.identity(self.moving_variance.value)
        outputs = super().call(inputs, training=training, mask=mask)
        if training:
            count = tf.cast(tf.shape(inputs)[0], "float32")
            if BUG != "count_of_replica":
                count = tf.distribute.get_replica_context().all_reduce("sum", count)
            added = self.moving_variance.value - self.momentum * before
            self.moving_variance.assign_add(added / (count - 1))
        return outputs


def main():
    strategy = make_strategy()
    keras.utils.set_random_seed(1)
    with strategy.scope():
        model = keras.Sequential(
            [
                keras.Input((6,)),
                keras.layers.Dense(8, "tanh"),
                Unbiased(synchronized=True),
                keras.layers.ReLU(),
                keras.layers.Dense(2),
            ]
        )
        loss = keras.losses.MeanSquaredError(reduction="sum")
        model.compile(keras.optimizers.SGD(0.01), loss)
    dataset = tf.data.Dataset.from_tensor_slices(get_data(EXAMPLES)).batch(BATCH_SIZE)
    with harness.training(model):
        model.fit(dataset, verbose=0)


if __name__ == "__main__":
    main()
