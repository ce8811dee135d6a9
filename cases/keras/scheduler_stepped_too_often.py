"""A schedule of the learning rate has one step for each update, however many replicas there are.

id = "keras/scheduler_stepped_too_often"
framework = "keras"
processes = 3
steps = 2
mode = "pair"
references = ["huggingface/accelerate#2142"]
tags = ["mirrored", "sgd"]

[wrong.step_of_each_replica]
title = "the schedule is stepped once for each replica"
place = { node = "update", step = 0, ranks = "all", tensors = ["*iteration*"] }
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


class Scheduled(keras.Sequential):
    """Its schedule reads the number of steps that the optimizer has made."""

    def train_step(self, data):
        logs = super().train_step(data)
        if BUG == "step_of_each_replica":
            replicas = tf.distribute.get_strategy().num_replicas_in_sync
            self.optimizer.iterations.assign_add(replicas - 1)
        return logs


def main():
    strategy = make_strategy()
    keras.utils.set_random_seed(1)
    with strategy.scope():
        model = Scheduled([keras.Input((6,)), keras.layers.Dense(8, "tanh"), keras.layers.Dense(2)])
        schedule = keras.optimizers.schedules.ExponentialDecay(0.1, 10, 0.5)
        model.compile(keras.optimizers.SGD(schedule), "mse")
    dataset = tf.data.Dataset.from_tensor_slices(get_data(2 * BATCH_SIZE)).batch(BATCH_SIZE)
    with harness.training(model):
        model.fit(dataset, verbose=0)


if __name__ == "__main__":
    main()
