"""Each gradient is clipped after its all-reduce; clipnorm of Keras clips those of each replica.

id = "keras/clipnorm_before_sum"
framework = "keras"
processes = 2
steps = 2
mode = "pair"
references = ["tensorflow/tensorflow#33929"]
tags = ["clipping", "mirrored", "sgd"]

[wrong.clipnorm]
title = "the optimizer has clipnorm"
place = { node = "gradient", step = 0, ranks = "all", tensors = "all" }
reference = "patched"
"""

import os

import keras
import numpy as np
import tensorflow as tf

from cases import harness

BUG = os.environ.get("BUG", "")
DEVICES = int(os.environ.get("DEVICES", 1))
BATCH_SIZE, MAX_NORM = 12, 0.05


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


class ClipsTheSum(keras.Sequential):
    """Divides what it has clipped by the number of replicas, since the optimizer sums again."""

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x, y, self(x, training=True))
        gradients = tape.gradient(loss, self.trainable_weights)
        if BUG != "clipnorm":
            context = tf.distribute.get_replica_context()
            gradients = context.all_reduce("sum", gradients)
            gradients = [tf.clip_by_norm(gradient, MAX_NORM) / DEVICES for gradient in gradients]
        self.optimizer.apply(gradients, self.trainable_weights)
        return {"loss": loss}


def main():
    strategy = make_strategy()
    keras.utils.set_random_seed(1)
    with strategy.scope():
        model = ClipsTheSum(
            [keras.Input((6,)), keras.layers.Dense(8, "tanh"), keras.layers.Dense(2)]
        )
        clipnorm = MAX_NORM if BUG == "clipnorm" else None
        model.compile(keras.optimizers.SGD(0.1, clipnorm=clipnorm), "mse")
    dataset = tf.data.Dataset.from_tensor_slices(get_data(2 * BATCH_SIZE)).batch(BATCH_SIZE)
    with harness.training(model):
        model.fit(dataset, verbose=0)


if __name__ == "__main__":
    main()
