"""Layers sample their weights in each step; replicas must sample the same ones.

id = "random/sampled_weights"
framework = "keras"
processes = 2
steps = 2
mode = "pair"
references = ["tensorflow/probability#1469"]
date = "2021-11"
tags = ["mirrored", "loader", "adam"]

[wrong.each_replica_samples_its_own_weights]
title = "each replica samples its own weights"
place = { node = "random", step = 0, ranks = [1], tensors = "all" }

[wrong.sample_does_not_depend_on_step]
title = "the sample does not depend on the step"
place = { node = "random", step = 1, ranks = "all", tensors = "all" }
"""

import os

import keras
import numpy as np
import tensorflow as tf

from cases import harness

BUG = os.environ.get("BUG", "")
DEVICES = int(os.environ.get("DEVICES", 1))
BATCH_SIZE, FEATURES, ALL_EXAMPLES = 16, 6, 400


def make_strategy():
    cpu = tf.config.list_physical_devices("CPU")[0]
    parts = [tf.config.LogicalDeviceConfiguration()] * DEVICES
    tf.config.set_logical_device_configuration(cpu, parts)
    return tf.distribute.MirroredStrategy(
        [f"CPU:{i}" for i in range(DEVICES)],
        cross_device_ops=tf.distribute.ReductionToOneDevice(),
    )


class SampledDense(keras.layers.Layer):
    """Has a normal distribution of each weight."""

    def __init__(self, units, seed):
        super().__init__()
        self.units, self.seed = units, seed

    def build(self, shape):
        shape = (shape[-1], self.units)
        self.mean = self.add_weight(name="mean", shape=shape)
        self.spread = self.add_weight(name="spread", shape=shape, initializer="zeros")

    def call(self, x, step):
        seed = self.seed
        context = tf.distribute.get_replica_context()
        if BUG == "each_replica_samples_its_own_weights" and context:
            seed += 100 * tf.cast(context.replica_id_in_sync_group, tf.int32)
        elif BUG == "sample_does_not_depend_on_step":
            step = 0
        noise = tf.random.stateless_normal(self.mean.shape, tf.stack([seed, step]))
        return x @ (self.mean + tf.nn.softplus(self.spread) * noise)

    def divergence(self):
        """Returns the divergence of all weights from standard normal ones."""
        deviation = tf.nn.softplus(self.spread)
        terms = deviation**2 + tf.square(self.mean) - 1 - 2 * tf.math.log(deviation)
        return tf.reduce_sum(terms) / 2


class Regression(keras.Model):
    def __init__(self):
        super().__init__()
        self.first, self.second = SampledDense(10, 1), SampledDense(1, 2)

    def call(self, x, step):
        return self.second(tf.sin(self.first(x, step=step)), step=step)


def main():
    strategy = make_strategy()
    keras.utils.set_random_seed(14)
    x = np.random.default_rng(3).normal(size=(2 * BATCH_SIZE, FEATURES)).astype("float32")
    with strategy.scope():
        model, optimizer = Regression(), keras.optimizers.Adam(0.03, epsilon=1e-3)
        model(x, step=0)

    def replica_step(x, y):
        step = tf.cast(optimizer.iterations, tf.int32)
        with tf.GradientTape() as tape:
            errors = tf.square(model(x, step=step)[:, 0] - y) / 2
            loss = tf.nn.compute_average_loss(errors, global_batch_size=BATCH_SIZE)
            penalty = sum(layer.divergence() for layer in model.layers)
            loss += tf.nn.scale_regularization_loss(penalty / ALL_EXAMPLES)
        weights = model.trainable_variables
        optimizer.apply(tape.gradient(loss, weights), weights)

    dataset = tf.data.Dataset.from_tensor_slices((x, x[:, 0] * x[:, 1])).batch(BATCH_SIZE)
    with harness.training(model, optimizer) as recorder:
        recorded = recorder.wrap(replica_step)
        train_step = tf.function(lambda x, y: strategy.run(recorded, args=(x, y)))
        for batch in strategy.experimental_distribute_dataset(dataset):
            train_step(*batch)


if __name__ == "__main__":
    main()
