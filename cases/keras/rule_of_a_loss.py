"""A loss has a backward rule of its own, which has to pass on what comes from above.

id = "keras/rule_of_a_loss"
framework = "keras"
processes = 2
steps = 2
mode = "pair"
references = ["tensorflow/tensorflow#55296"]
date = "2022-03"
tags = ["mirrored", "loader", "sgd"]

[wrong.rule_leaves_out_what_comes_from_above]
title = "the rule leaves out what comes from above"
place = { node = "gradient", step = 0, ranks = "all", tensors = "all" }

[wrong.rule_divides_by_own_examples_again]
title = "the rule divides by the own examples again"
place = { node = "gradient", step = 0, ranks = "all", tensors = "all" }
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


@tf.custom_gradient
def losses_of(logits, labels):
    """Returns the cross entropy of each example; labels are chances."""
    chances = tf.nn.softmax(logits)

    def gradient(above):
        below = chances - labels
        if BUG == "rule_leaves_out_what_comes_from_above":
            return below, None
        below = above[:, None] * below
        if BUG == "rule_divides_by_own_examples_again":
            below /= tf.cast(tf.shape(logits)[0], tf.float32)
        return below, None

    return -tf.reduce_sum(labels * tf.nn.log_softmax(logits), -1), gradient


def main():
    strategy = make_strategy()
    keras.utils.set_random_seed(31)
    random = np.random.default_rng(31)
    x = random.normal(size=(2 * BATCH_SIZE, 6)).astype("float32")
    y = np.eye(3, dtype="float32")[x[:, :3].argmax(1)] * 0.9 + 1 / 30
    dataset = tf.data.Dataset.from_tensor_slices((x, y.astype("float32"))).batch(BATCH_SIZE)
    with strategy.scope():
        layers = [keras.layers.Dense(14, "gelu"), keras.layers.Dense(3)]
        model = keras.Sequential([keras.Input((6,)), *layers])
        optimizer = keras.optimizers.SGD(0.2, momentum=0.9)
        optimizer.build(model.trainable_variables)

    def step(x, y):
        with tf.GradientTape() as tape:
            losses = losses_of(model(x, training=True), y)
            loss = tf.nn.compute_average_loss(losses, global_batch_size=BATCH_SIZE)
        weights = model.trainable_variables
        optimizer.apply(tape.gradient(loss, weights), weights)

    with harness.training(model, optimizer) as recorder:
        recorded = recorder.wrap(step)
        train_step = tf.function(lambda x, y: strategy.run(recorded, args=(x, y)))
        for batch in strategy.experimental_distribute_dataset(dataset):
            train_step(*batch)


if __name__ == "__main__":
    main()
