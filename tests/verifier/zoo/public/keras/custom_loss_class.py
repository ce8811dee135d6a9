"""A loss class that reduces its losses itself is scaled by the number of replicas again.

reference = "keras-team/keras#16285, tensorflow/tensorflow#55321"
date = "2022-03"
framework = "keras"

[wrong]
"a mean over the replica in a custom train_step" = [
    "sum_instead_of_mean",
    "scalar_loss_not_divided",
]
"a sum divided by the global batch, and by the replicas" = [
    "scaled_gradient",
    "mean_instead_of_sum",
]
"""

import os

import keras
import numpy as np
import tensorflow as tf

import lockstep

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
        if BUG == "a mean over the replica in a custom train_step":
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
            if BUG == "a sum divided by the global batch, and by the replicas":
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
with lockstep.record(model):
    model.fit(x, y, BATCH_SIZE, shuffle=False, verbose=0)
