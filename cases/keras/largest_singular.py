"""Spectral normalisation divides a kernel by its largest singular value, whose vector it keeps.

id = "keras/largest_singular"
framework = "keras"
processes = 2
steps = 3
mode = "pair"
references = ["tensorflow/tensorflow#37834", "tensorflow/tensorflow#41216"]
date = "2020-03"
tags = ["mirrored", "loader", "sgd"]

[wrong.vectors_of_replicas_are_added]
title = "vectors of the replicas are added"
place = { node = "update", step = 0, ranks = "all", tensors = ["*/vector"] }

[wrong.vector_is_not_kept]
title = "the vector is not kept"
place = { node = "update", step = 0, ranks = "all", tensors = ["*/vector"] }

[wrong.divided_kernel_is_assigned_between_steps]
title = "the divided kernel is assigned between steps"
place = { node = "between", step = 0, ranks = "all", tensors = ["*/kernel"] }
"""

import os

import keras
import numpy as np
import tensorflow as tf

from cases import harness

BUG = os.environ.get("BUG", "")
DEVICES = int(os.environ.get("DEVICES", 1))
BATCH_SIZE, STEPS = 16, 3


def make_strategy():
    cpu = tf.config.list_physical_devices("CPU")[0]
    parts = [tf.config.LogicalDeviceConfiguration()] * DEVICES
    tf.config.set_logical_device_configuration(cpu, parts)
    return tf.distribute.MirroredStrategy(
        [f"CPU:{i}" for i in range(DEVICES)],
        cross_device_ops=tf.distribute.ReductionToOneDevice(),
    )


class SpectralDense(keras.layers.Layer):
    """Finds the largest singular value by one power iteration in each step."""

    def __init__(self, units, activation=None):
        super().__init__()
        self.units, self.activation = units, keras.activations.get(activation)

    def build(self, shape):
        added = BUG == "vectors_of_replicas_are_added"
        self.kernel = self.add_weight(name="kernel", shape=(shape[-1], self.units))
        self.bias = self.add_weight(name="bias", shape=(self.units,), initializer="zeros")
        self.vector = self.add_weight(
            name="vector", shape=(self.units,), initializer="random_normal", trainable=False,
            aggregation="sum" if added else "mean",
        )  # fmt: skip

    def largest(self):
        """Returns the singular value, and the vector that belongs to it."""
        kernel = tf.convert_to_tensor(self.kernel)
        left = tf.math.l2_normalize(tf.linalg.matvec(kernel, self.vector))
        right = tf.math.l2_normalize(tf.linalg.matvec(kernel, left, transpose_a=True))
        left, right = tf.stop_gradient(left), tf.stop_gradient(right)
        return tf.tensordot(left, tf.linalg.matvec(kernel, right), 1), right

    def call(self, x, training=False):
        value, right = self.largest()
        if training and BUG != "vector_is_not_kept":
            self.vector.assign(right)
        return self.activation(x @ (self.kernel / value) + self.bias)


def build_critic():
    layers = [SpectralDense(12, "leaky_relu"), SpectralDense(8, "leaky_relu"), SpectralDense(1)]
    return keras.Sequential([keras.Input((6,)), *layers])


def main():
    strategy = make_strategy()
    keras.utils.set_random_seed(7)
    random = np.random.default_rng(2)
    x = random.normal(size=(STEPS * BATCH_SIZE, 6)).astype("float32")
    signs = np.sign(np.prod(x[:, :2], 1))
    with strategy.scope():
        model, optimizer = build_critic(), keras.optimizers.SGD(0.2, momentum=0.5)

    def replica_step(x, sign):
        with tf.GradientTape() as tape:
            losses = tf.nn.relu(1 - sign * model(x, training=True)[:, 0])
            loss = tf.nn.compute_average_loss(losses, global_batch_size=BATCH_SIZE)
        weights = model.trainable_variables
        optimizer.apply(tape.gradient(loss, weights), weights)

    dataset = tf.data.Dataset.from_tensor_slices((x, signs)).batch(BATCH_SIZE)
    with harness.training(model, optimizer) as recorder:
        recorded = recorder.wrap(replica_step)
        train_step = tf.function(lambda x, y: strategy.run(recorded, args=(x, y)))
        for batch in strategy.experimental_distribute_dataset(dataset):
            train_step(*batch)
            if BUG == "divided_kernel_is_assigned_between_steps":
                for layer in model.layers:
                    layer.kernel.assign(layer.kernel / layer.largest()[0])


if __name__ == "__main__":
    main()
