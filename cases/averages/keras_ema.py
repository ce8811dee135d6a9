"""Keras with MirroredStrategy: an average of the weights that each replica updates.

id = "averages/keras_ema"
framework = "keras"
processes = 2
steps = 2
mode = "pair"
references = ["tensorflow/addons#605", "tensorflow/tensorflow#23291"]
date = "2019-10"
tags = ["mirrored", "sgd"]

[wrong.once_per_replica]
title = "once per replica"
place = { node = "update", step = 0, ranks = "all", tensors = ["*average*"] }

[wrong.before_update]
title = "before the update"
place = { node = "update", step = 0, ranks = "all", tensors = ["*average*"] }
"""

import os

import keras
import numpy as np
import tensorflow as tf

from cases import harness

BUG = os.environ.get("BUG", "")
DEVICES = int(os.environ.get("DEVICES", 1))
BATCH, DECAY = 16, 0.9


class Averaging(keras.optimizers.SGD):
    """Keeps a moving average of each weight as state of the optimizer."""

    def build(self, variables):
        if not self.built:
            super().build(variables)
            self.averages = [self.add_variable_from_reference(v, "average") for v in variables]
            for average, weight in zip(self.averages, variables, strict=True):
                average.assign(weight)

    def update_step(self, gradient, weight, learning_rate):
        average = self.averages[self._get_variable_index(weight)]
        before = tf.identity(weight)
        super().update_step(gradient, weight, learning_rate)
        value = before if BUG == "before_update" else tf.identity(weight)
        for _ in range(DEVICES if BUG == "once_per_replica" else 1):
            self.assign(average, DECAY * average + (1 - DECAY) * value)


def main():
    cpu = tf.config.list_physical_devices("CPU")[0]
    one = tf.config.LogicalDeviceConfiguration()
    tf.config.set_logical_device_configuration(cpu, [one] * DEVICES)
    names = [f"CPU:{i}" for i in range(DEVICES)]
    reduction = tf.distribute.ReductionToOneDevice()
    strategy = tf.distribute.MirroredStrategy(names, cross_device_ops=reduction)
    keras.utils.set_random_seed(0)
    x = np.random.default_rng(0).normal(size=(2 * BATCH, 6)).astype("float32")
    dataset = tf.data.Dataset.from_tensor_slices((x, x[:, :3].argmax(1))).batch(BATCH)
    with strategy.scope():
        layers = [keras.layers.Dense(10, "relu"), keras.layers.Dense(3)]
        model = keras.Sequential([keras.Input((6,)), *layers])
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(Averaging(0.3, momentum=0.9), loss)
    with harness.training(model):
        model.fit(dataset, epochs=1, shuffle=False, verbose=0)


main()
