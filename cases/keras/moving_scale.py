"""A layer keeps a moving scale of its inputs, which the replicas put together as it was declared.

id = "keras/moving_scale"
framework = "keras"
processes = 2
steps = 3
mode = "pair"
references = ["keras-team/keras#20541"]
date = "2024-11"
tags = ["mirrored", "loader", "sgd"]

[wrong.scales_of_replicas_are_added]
title = "the scales of the replicas are added"
place = { node = "update", step = 0, ranks = "all", tensors = ["*/square"] }

[wrong.scale_is_that_of_first_replica]
title = "the scale is that of the first replica"
place = { node = "update", step = 0, ranks = "all", tensors = ["*/square"] }
"""

import os

import keras
import numpy as np
import tensorflow as tf

from cases import harness

BUG = os.environ.get("BUG", "")
DEVICES = int(os.environ.get("DEVICES", 1))
BATCH_SIZE, KEPT = 8, 0.6


def make_strategy():
    cpu = tf.config.list_physical_devices("CPU")[0]
    parts = [tf.config.LogicalDeviceConfiguration()] * DEVICES
    tf.config.set_logical_device_configuration(cpu, parts)
    return tf.distribute.MirroredStrategy(
        [f"CPU:{i}" for i in range(DEVICES)],
        cross_device_ops=tf.distribute.ReductionToOneDevice(),
    )


class MovingScale(keras.layers.Layer):
    """Divides by the root of a moving mean of squares, as it was before the step."""

    def build(self, shape):
        aggregation = "mean"
        if BUG == "scales_of_replicas_are_added":
            aggregation = "sum"
        elif BUG == "scale_is_that_of_first_replica":
            aggregation = "only_first_replica"
        self.square = self.add_weight(
            name="square", shape=(shape[-1],), initializer="ones", trainable=False,
            aggregation=aggregation,
        )  # fmt: skip

    def call(self, x, training=False):
        y = x / tf.sqrt(self.square + 1e-3)
        if training:
            new = tf.reduce_mean(tf.square(tf.stop_gradient(x)), 0)
            self.square.assign(KEPT * self.square + (1 - KEPT) * new)
        return y


def main():
    strategy = make_strategy()
    keras.utils.set_random_seed(2)
    random = np.random.default_rng(1)
    x = random.normal(size=(3 * BATCH_SIZE, 6)).astype("float32")
    x[np.arange(len(x)) % BATCH_SIZE < BATCH_SIZE // 2] *= 2
    with strategy.scope():
        layers = [keras.Input((6,)), MovingScale(), keras.layers.Dense(14, "tanh")]
        model = keras.Sequential([*layers, keras.layers.Dense(2)])
        optimizer = keras.optimizers.SGD(0.3, momentum=0.9)

    def replica_step(x, y):
        with tf.GradientTape() as tape:
            errors = tf.reduce_mean(tf.square(model(x, training=True) - y), -1)
            loss = tf.nn.compute_average_loss(errors, global_batch_size=BATCH_SIZE)
        weights = model.trainable_variables
        optimizer.apply(tape.gradient(loss, weights), weights)

    with harness.training(model, optimizer) as recorder:
        recorded = recorder.wrap(replica_step)
        train_step = tf.function(lambda x, y: strategy.run(recorded, args=(x, y)))
        dataset = tf.data.Dataset.from_tensor_slices((x, np.sin(x[:, :2]))).batch(BATCH_SIZE)
        for batch in strategy.experimental_distribute_dataset(dataset):
            train_step(*batch)


if __name__ == "__main__":
    main()
