"""Weighted losses of examples are divided by the sum of the weights, which replicas do not share.

id = "losses/sample_weights"
framework = "keras"
processes = 2
steps = 2
mode = "pair"
references = ["keras-team/keras#19740", "tensorflow/tensorflow#28956"]
date = "2024-05"
tags = ["mirrored", "loader", "sgd"]

[wrong.weights_of_replica]
title = "the weights of the replica"
place = { node = "loss", step = 0, ranks = "all", tensors = "all" }

[wrong.number_of_examples]
title = "the number of examples"
place = { node = "loss", step = 0, ranks = "all", tensors = "all" }

[wrong.loss_is_mean_over_replicas]
title = "the loss is the mean over replicas"
place = { node = "loss", step = 0, ranks = "all", tensors = "all" }
"""

import os

import keras
import numpy as np
import tensorflow as tf

from cases import harness

BUG = os.environ.get("BUG", "")
DEVICES = int(os.environ.get("DEVICES", 1))
BATCH_SIZE, STEPS = 12, 2


def make_strategy():
    if DEVICES == 1:
        return tf.distribute.get_strategy()
    cpu = tf.config.list_physical_devices("CPU")[0]
    parts = [tf.config.LogicalDeviceConfiguration()] * DEVICES
    tf.config.set_logical_device_configuration(cpu, parts)
    return tf.distribute.MirroredStrategy([f"CPU:{i}" for i in range(DEVICES)])


def build_model():
    return keras.Sequential(
        [
            keras.Input((6,)),
            keras.layers.Dense(16, "tanh"),
            keras.layers.LayerNormalization(),
            keras.layers.Dense(16, "tanh"),
            keras.layers.Dense(3),
        ]
    )


def get_data():
    """Returns inputs, classes and weights; half of each batch has the large weights."""
    random = np.random.default_rng(0)
    x = random.normal(size=(BATCH_SIZE * STEPS, 6)).astype("float32")
    weights = random.uniform(0.1, 1.0, len(x)).astype("float32")
    weights[np.arange(len(x)) % BATCH_SIZE < BATCH_SIZE // 2] *= 8
    return x, x[:, :3].argmax(1), weights


keras.utils.set_random_seed(0)
strategy = make_strategy()
with strategy.scope():
    model = build_model()
    optimizer = keras.optimizers.SGD(0.1, momentum=0.9)
    model.build((None, 6))
    optimizer.build(model.trainable_variables)
loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="none")


def replica_step(x, y, weights):
    replicas = tf.distribute.get_replica_context()
    divisor = tf.reduce_sum(weights)
    if BUG == "number_of_examples":
        divisor = tf.constant(float(BATCH_SIZE))
    elif BUG == "weights_of_replica":
        divisor *= DEVICES
    else:
        divisor = replicas.all_reduce("SUM", divisor)
    if BUG == "loss_is_mean_over_replicas":
        divisor *= DEVICES
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(loss_of(y, model(x, training=True)) * weights) / divisor
    gradients = tape.gradient(loss, model.trainable_variables)
    optimizer.apply(gradients, model.trainable_variables)
    return loss


dataset = tf.data.Dataset.from_tensor_slices(get_data()).batch(BATCH_SIZE, drop_remainder=True)
with harness.training(model, optimizer) as recorder:
    recorded_step = recorder.wrap(replica_step)

    @tf.function
    def train_step(batch):
        return strategy.run(recorded_step, args=batch)

    for batch in strategy.experimental_distribute_dataset(dataset):
        train_step(batch)
