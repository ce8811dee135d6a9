"""The focal loss of each image is divided by its number of positive anchors, not the batch's.

id = "keras/positive_anchors"
framework = "keras"
processes = 2
steps = 2
mode = "pair"
references = ["fizyr/keras-retinanet#79", "fizyr/keras-retinanet#709"]
date = "2017-11"
tags = ["mirrored", "loader", "sgd"]

[wrong.divided_by_positive_anchors_of_replica]
title = "divided by the positive anchors of the replica's images"
place = { node = "loss", step = 0, ranks = "all", tensors = "all" }

[wrong.divided_by_all_anchors_that_are_not_ignored]
title = "divided by all anchors that are not ignored"
place = { node = "loss", step = 0, ranks = "all", tensors = "all" }

[wrong.ignored_anchors_count_as_negative]
title = "ignored anchors count as negative"
place = { node = "loss", step = 0, ranks = "all", tensors = "all" }
"""

import os

import keras
import numpy as np
import tensorflow as tf

from cases import harness

BUG = os.environ.get("BUG", "")
DEVICES = int(os.environ.get("DEVICES", 1))
BATCH_SIZE, SIZE, ALPHA, GAMMA = 8, 6, 0.25, 2.0


def make_strategy():
    cpu = tf.config.list_physical_devices("CPU")[0]
    parts = [tf.config.LogicalDeviceConfiguration()] * DEVICES
    tf.config.set_logical_device_configuration(cpu, parts)
    return tf.distribute.MirroredStrategy(
        [f"CPU:{i}" for i in range(DEVICES)],
        cross_device_ops=tf.distribute.ReductionToOneDevice(),
    )


def build_model():
    inputs = keras.Input((SIZE, SIZE, 1))
    x = keras.layers.Conv2D(8, 3, padding="same", activation="relu")(inputs)
    x = keras.layers.Conv2D(2, 3, padding="same", bias_initializer=constant(-1.0))(x)
    return keras.Model(inputs, keras.layers.Reshape((2 * SIZE * SIZE,))(x))


def constant(value):
    return keras.initializers.Constant(value)


def focal_losses(states, logits):
    """Returns the loss of each image. States: 1 for positive anchors, 0 negative, -1 ignored."""
    targets = tf.cast(states == 1, tf.float32)
    chances = tf.sigmoid(logits)
    missed = tf.where(states == 1, 1 - chances, chances)
    entropies = tf.nn.sigmoid_cross_entropy_with_logits(targets, logits)
    losses = tf.where(states == 1, ALPHA, 1 - ALPHA) * missed**GAMMA * entropies
    is_counted = tf.cast(states != -1, tf.float32)
    if BUG != "ignored_anchors_count_as_negative":
        losses = losses * is_counted
    number = tf.reduce_sum(targets, 1)
    if BUG == "divided_by_all_anchors_that_are_not_ignored":
        number = tf.reduce_sum(is_counted, 1)
    elif BUG == "divided_by_positive_anchors_of_replica":
        number = tf.reduce_mean(number)
    return tf.reduce_sum(losses, 1) / tf.maximum(number, 1)


def main():
    strategy = make_strategy()
    keras.utils.set_random_seed(2)
    random = np.random.default_rng(1)
    images = random.normal(size=(2 * BATCH_SIZE, SIZE, SIZE, 1)).astype("float32")
    # Some images are full of objects, and some have nearly none.
    limits = np.tile([2.0, 0.3, 1.8, 0.5, 2.2, 0.2, 1.5, 0.8], 2)[:, None, None, None]
    states = np.concatenate([images > limits, -images > limits], -1).astype("int32")
    states[(np.abs(images) > limits - 0.3) & (states == 0)] = -1
    states = states.reshape(len(images), -1)
    with strategy.scope():
        model = build_model()
        optimizer = keras.optimizers.SGD(0.2, momentum=0.9, nesterov=True)

    def replica_step(x, y):
        with tf.GradientTape() as tape:
            losses = focal_losses(y, model(x, training=True))
            loss = tf.nn.compute_average_loss(losses, global_batch_size=BATCH_SIZE)
        weights = model.trainable_variables
        optimizer.apply(tape.gradient(loss, weights), weights)

    with harness.training(model, optimizer) as recorder:
        recorded = recorder.wrap(replica_step)
        train_step = tf.function(lambda x, y: strategy.run(recorded, args=(x, y)))
        dataset = tf.data.Dataset.from_tensor_slices((images, states)).batch(BATCH_SIZE)
        for x, y in strategy.experimental_distribute_dataset(dataset):
            train_step(x, y)


if __name__ == "__main__":
    main()
