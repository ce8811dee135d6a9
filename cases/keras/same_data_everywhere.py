"""Each replica has an input pipeline of its own, which has to take its part of the data.

id = "keras/same_data_everywhere"
framework = "keras"
processes = 3
steps = 2
mode = "pair"
references = ["horovod/horovod#223"]
tags = ["mirrored", "loader", "sgd"]

[wrong.not_sharded]
title = "the data set is not sharded"
place = { node = "examples", step = 0, ranks = [1, 2], tensors = "all" }
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


def get_data(num_examples):
    random = np.random.default_rng(0)
    x = random.normal(size=(num_examples, 6)).astype("float32")
    return x, np.tanh(x @ random.normal(size=(6, 2))).astype("float32")


def pipeline(replica):
    """Returns the batches of one replica, as a program of one device has them."""
    whole = tf.data.Dataset.from_tensor_slices(get_data(2 * BATCH_SIZE))
    whole = whole.batch(BATCH_SIZE // DEVICES)
    return whole if BUG == "not_sharded" else whole.shard(DEVICES, replica)


def hand_out(strategy, pipelines):
    """Hands batch n of pipeline r to replica r in step n."""
    turns = tf.data.Dataset.range(len(pipelines)).repeat()
    merged = tf.data.Dataset.choose_from_datasets(pipelines, turns)
    return strategy.distribute_datasets_from_function(lambda context: merged)


def main():
    strategy = make_strategy()
    keras.utils.set_random_seed(1)
    with strategy.scope():
        model = keras.Sequential(
            [keras.Input((6,)), keras.layers.Dense(8, "tanh"), keras.layers.Dense(2)]
        )
        model.compile(keras.optimizers.SGD(0.1), "mse")
    batches = hand_out(strategy, [pipeline(replica) for replica in range(DEVICES)])
    with harness.training(model):
        model.fit(batches, steps_per_epoch=2, verbose=0)


if __name__ == "__main__":
    main()
