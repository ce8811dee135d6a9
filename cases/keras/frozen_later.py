"""A layer is frozen after the list of the weights to train was made.

id = "keras/frozen_later"
framework = "keras"
processes = 2
steps = 2
mode = "pair"
references = ["osh/KerasGAN#10"]
date = "2017-03"
tags = ["mirrored", "loader", "sgd"]

[wrong.list_of_weights_is_older_than_freezing]
title = "the list of weights is older than the freezing"
place = { node = "start", step = 0, ranks = "all", tensors = ["dense/kernel", "dense/bias"] }

[wrong.layer_after_it_is_frozen_too]
title = "the layer after it is frozen, too"
place = { node = "start", step = 0, ranks = "all", tensors = ["dense_1/kernel", "dense_1/bias"] }
"""

import os

import keras
import numpy as np
import tensorflow as tf

from cases import harness

BUG = os.environ.get("BUG", "")
DEVICES = int(os.environ.get("DEVICES", 1))
BATCH_SIZE = 10


def make_strategy():
    cpu = tf.config.list_physical_devices("CPU")[0]
    parts = [tf.config.LogicalDeviceConfiguration()] * DEVICES
    tf.config.set_logical_device_configuration(cpu, parts)
    return tf.distribute.MirroredStrategy(
        [f"CPU:{i}" for i in range(DEVICES)],
        cross_device_ops=tf.distribute.ReductionToOneDevice(),
    )


class FineTuning:
    def __init__(self, strategy):
        self.strategy = strategy
        with strategy.scope():
            layers = [keras.layers.Dense(12, "relu"), keras.layers.Dense(8, "relu")]
            self.model = keras.Sequential([keras.Input((5,)), *layers, keras.layers.Dense(3)])
            self.optimizer = keras.optimizers.SGD(0.3, momentum=0.9)
        self.losses = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction=None)
        self.weights = self.model.trainable_variables
        self.model.layers[0].trainable = False
        if BUG == "layer_after_it_is_frozen_too":
            self.model.layers[1].trainable = False
        if BUG != "list_of_weights_is_older_than_freezing":
            self.weights = self.model.trainable_variables

    def replica_step(self, x, y):
        with tf.GradientTape() as tape:
            losses = self.losses(y, self.model(x, training=True))
            loss = tf.nn.compute_average_loss(losses, global_batch_size=BATCH_SIZE)
        self.optimizer.apply(tape.gradient(loss, self.weights), self.weights)

    def fit(self, dataset):
        with harness.training(self.model, self.optimizer) as recorder:
            recorded = recorder.wrap(self.replica_step)
            step = tf.function(lambda x, y: self.strategy.run(recorded, args=(x, y)))
            for x, y in self.strategy.experimental_distribute_dataset(dataset):
                step(x, y)


def main():
    strategy = make_strategy()
    keras.utils.set_random_seed(4)
    x = np.random.default_rng(6).normal(size=(2 * BATCH_SIZE, 5)).astype("float32")
    y = x[:, :3].argmax(1)
    FineTuning(strategy).fit(tf.data.Dataset.from_tensor_slices((x, y)).batch(BATCH_SIZE))


if __name__ == "__main__":
    main()
