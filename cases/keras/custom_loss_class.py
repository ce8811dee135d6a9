"""A loss class that reduces its losses itself is scaled by the number of replicas again.

id = "keras/custom_loss_class"
framework = "keras"
processes = 2
steps = 2
mode = "pair"
references = ["keras-team/keras#16285", "tensorflow/tensorflow#55321"]
date = "2022-03"
tags = ["mirrored", "sgd"]

[wrong.mean_over_replica_in_custom_train_step]
title = "a mean over the replica in a custom train_step"
place = { node = "loss", step = 0, ranks = "all", tensors = "all" }

[wrong.sum_divided_by_global_batch_and_by_replicas]
title = "a sum divided by the global batch, and by the replicas"
place = { node = "loss", step = 0, ranks = "all", tensors = "all" }
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


class AbsoluteError(keras.losses.Loss):
    """Divides the sum of the errors by the number of examples of all replicas."""

    def __init__(self):
        super().__init__(reduction=None)

    def call(self, target, output):
        errors = tf.reduce_mean(tf.abs(target - output), -1)
        if BUG == "mean_over_replica_in_custom_train_step":
            return tf.reduce_mean(errors)
        return tf.reduce_sum(errors) / BATCH_SIZE


class Model(keras.Model):
    def __init__(self):
        super().__init__()
        self.hidden = keras.layers.Dense(12, "softplus")
        self.out = keras.layers.Dense(3)
        self.error = AbsoluteError()

    def call(self, x, training=False):
        return self.out(self.hidden(x))

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.error(y, self(x, training=True))
            if BUG == "sum_divided_by_global_batch_and_by_replicas":
                loss = loss / tf.distribute.get_strategy().num_replicas_in_sync
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply(gradients, self.trainable_variables)
        return {"loss": loss}


strategy = make_strategy()
keras.utils.set_random_seed(3)
random = np.random.default_rng(0)
x = random.normal(size=(2 * BATCH_SIZE, 5)).astype("float32")
y = np.sin(2 * x[:, :3])
with strategy.scope():
    model = Model()
    model.build((None, 5))
    model.compile(optimizer=keras.optimizers.SGD(0.2))
with harness.training(model):
    model.fit(x, y, BATCH_SIZE, shuffle=False, verbose=0)
