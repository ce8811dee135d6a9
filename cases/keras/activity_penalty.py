"""A layer adds a penalty on its outputs, whose size depends on the examples of a replica.

id = "keras/activity_penalty"
framework = "keras"
processes = 2
steps = 2
mode = "pair"
references = ["keras-team/keras#22021"]
date = "2026-01"
tags = ["mirrored", "loader", "sgd"]

[wrong.penalty_of_each_replica_counts_in_full]
title = "the penalty of each replica counts in full"
place = { node = "loss", step = 0, ranks = "all", tensors = ["dense/kernel", "dense/bias"] }

[wrong.penalty_is_summed_over_examples]
title = "the penalty is summed over the examples"
place = { node = "loss", step = 0, ranks = "all", tensors = ["dense/kernel", "dense/bias"] }

[wrong.penalty_is_not_in_loss]
title = "the penalty is not in the loss"
place = { node = "loss", step = 0, ranks = "all", tensors = ["dense/kernel", "dense/bias"] }
"""

import os

import keras
import numpy as np
import tensorflow as tf

from cases import harness

BUG = os.environ.get("BUG", "")
DEVICES = int(os.environ.get("DEVICES", 1))
BATCH_SIZE, STRENGTH = 12, 0.2


def make_strategy():
    cpu = tf.config.list_physical_devices("CPU")[0]
    parts = [tf.config.LogicalDeviceConfiguration()] * DEVICES
    tf.config.set_logical_device_configuration(cpu, parts)
    return tf.distribute.MirroredStrategy(
        [f"CPU:{i}" for i in range(DEVICES)],
        cross_device_ops=tf.distribute.ReductionToOneDevice(),
    )


class Sparse(keras.layers.Layer):
    """Passes its inputs on, and adds their mean absolute sum over examples to the losses."""

    def call(self, x):
        penalties = STRENGTH * tf.reduce_sum(tf.abs(x), -1)
        if BUG == "penalty_is_summed_over_examples":
            self.add_loss(tf.reduce_sum(penalties))
        else:
            self.add_loss(tf.reduce_mean(penalties))
        return x


def main():
    strategy = make_strategy()
    keras.utils.set_random_seed(5)
    random = np.random.default_rng(3)
    images = random.normal(size=(2 * BATCH_SIZE, 6)).astype("float32")
    with strategy.scope():
        inputs = keras.Input((6,))
        code = Sparse()(keras.layers.Dense(10, "softplus")(inputs))
        model = keras.Model(inputs, keras.layers.Dense(6)(code))
        optimizer = keras.optimizers.SGD(0.1, momentum=0.9)

    def replica_step(x):
        with tf.GradientTape() as tape:
            errors = tf.reduce_sum(tf.square(model(x, training=True) - x), -1)
            loss = tf.nn.compute_average_loss(errors, global_batch_size=BATCH_SIZE)
            penalty = tf.add_n(model.losses)
            if BUG != "penalty_of_each_replica_counts_in_full":
                penalty = penalty / DEVICES
            if BUG != "penalty_is_not_in_loss":
                loss = loss + penalty
        weights = model.trainable_variables
        optimizer.apply(tape.gradient(loss, weights), weights)

    with harness.training(model, optimizer) as recorder:
        recorded = recorder.wrap(replica_step)
        train_step = tf.function(lambda x: strategy.run(recorded, args=(x,)))
        dataset = tf.data.Dataset.from_tensor_slices(images).batch(BATCH_SIZE)
        for x in strategy.experimental_distribute_dataset(dataset):
            train_step(x)


if __name__ == "__main__":
    main()
