"""A layer keeps features in an attribute until the loss needs them, and replicas share the layer.

id = "keras/kept_features"
framework = "keras"
processes = 2
steps = 2
mode = "pair"
references = ["keras-team/keras#16999", "keras-team/tf-keras#433"]
date = "2022-09"
tags = ["batch_norm", "mirrored", "loader", "sgd"]

[wrong.features_are_kept_in_layer]
title = "features are kept in the layer"
place = { node = "outputs", step = 0, ranks = "all", tensors = "all" }
"""

import os

import keras
import numpy as np
import tensorflow as tf

from cases import harness

BUG = os.environ.get("BUG", "")
DEVICES = int(os.environ.get("DEVICES", 1))
BATCH_SIZE, SIZE = 16, 10


def make_strategy():
    cpu = tf.config.list_physical_devices("CPU")[0]
    parts = [tf.config.LogicalDeviceConfiguration()] * DEVICES
    tf.config.set_logical_device_configuration(cpu, parts)
    return tf.distribute.MirroredStrategy(
        [f"CPU:{i}" for i in range(DEVICES)],
        cross_device_ops=tf.distribute.ReductionToOneDevice(),
    )


class Refiner(keras.Model):
    """Improves an output in stages, all of which are compared with the target."""

    def __init__(self):
        super().__init__()
        self.blocks = [keras.layers.Dense(SIZE, "selu") for _ in range(3)]
        self.norms = [keras.layers.BatchNormalization(synchronized=True) for _ in range(3)]
        self.head = keras.layers.Dense(2)

    def call(self, x, training=False):
        features = []
        self.kept = []
        for block, norm in zip(self.blocks, self.norms, strict=True):
            x = x + block(norm(x, training=training))  # Waits for the other replicas.
            features.append(x)
            self.kept.append(x)
        if BUG == "features_are_kept_in_layer":
            features = self.kept
        return [self.head(x) for x in features]


def main():
    strategy = make_strategy()
    keras.utils.set_random_seed(21)
    random = np.random.default_rng(6)
    x = random.normal(size=(2 * BATCH_SIZE, SIZE)).astype("float32")
    y = np.maximum(x[:, :2], x[:, 2:4])
    with strategy.scope():
        model, optimizer = Refiner(), keras.optimizers.SGD(0.1, momentum=0.9)
        model(tf.zeros((1, SIZE)))

    def replica_step(x, y):
        with tf.GradientTape() as tape:
            errors = [keras.losses.log_cosh(y, output) for output in model(x, training=True)]
            errors = tf.add_n(errors) / len(errors)
            loss = tf.nn.compute_average_loss(errors, global_batch_size=BATCH_SIZE)
        weights = model.trainable_variables
        optimizer.apply(tape.gradient(loss, weights), weights)

    dataset = tf.data.Dataset.from_tensor_slices((x, y)).batch(BATCH_SIZE)
    with harness.training(model, optimizer) as recorder:
        recorded = recorder.wrap(replica_step)
        train_step = tf.function(lambda x, y: strategy.run(recorded, args=(x, y)))
        for batch in strategy.experimental_distribute_dataset(dataset):
            train_step(*batch)


if __name__ == "__main__":
    main()
