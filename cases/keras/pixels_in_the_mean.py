"""A segmentation's loss has a value for each pixel, of which an image has many.

id = "keras/pixels_in_the_mean"
framework = "keras"
processes = 2
steps = 2
mode = "pair"
references = ["tensorflow/tensorflow#33651"]
date = "2019-10"
tags = ["mirrored", "loader", "sgd"]

[wrong.sums_of_pixels_are_divided_by_batch]
title = "sums of pixels are divided by the batch"
place = { node = "loss", step = 0, ranks = "all", tensors = "all" }

[wrong.pixels_are_averaged_on_each_replica]
title = "pixels are averaged on each replica"
place = { node = "loss", step = 0, ranks = "all", tensors = "all" }
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


def main():
    strategy = make_strategy()
    keras.utils.set_random_seed(6)
    random = np.random.default_rng(1)
    x = random.normal(size=(2 * BATCH_SIZE, 6, 6, 1)).astype("float32")
    y = (x > 0).astype("float32")
    dataset = tf.data.Dataset.from_tensor_slices((x, y)).batch(BATCH_SIZE)
    dataset = strategy.experimental_distribute_dataset(dataset)
    with strategy.scope():
        model = keras.Sequential(
            [
                keras.Input((6, 6, 1)),
                keras.layers.Conv2D(6, 3, padding="same", activation="silu"),
                keras.layers.Conv2D(1, 3, padding="same"),
            ]
        )
        optimizer = keras.optimizers.SGD(0.01, momentum=0.9)
        optimizer.build(model.trainable_variables)

    def compute_loss(labels, logits):
        losses = tf.nn.sigmoid_cross_entropy_with_logits(labels, logits)
        if BUG == "sums_of_pixels_are_divided_by_batch":
            return tf.reduce_sum(losses) / BATCH_SIZE
        if BUG == "pixels_are_averaged_on_each_replica":
            return tf.reduce_mean(losses)
        return tf.reduce_sum(tf.reduce_mean(losses, axis=(1, 2, 3))) / BATCH_SIZE

    def step(batch):
        images, labels = batch
        with tf.GradientTape() as tape:
            loss = compute_loss(labels, model(images, training=True))
        grads = tape.gradient(loss, model.trainable_variables)
        optimizer.apply(grads, model.trainable_variables)
        return loss

    with harness.training(model, optimizer) as recorder:
        recorded_step = recorder.wrap(step)

        @tf.function
        def train_step(batch):
            strategy.run(recorded_step, args=(batch,))

        for batch in dataset:
            train_step(batch)


if __name__ == "__main__":
    main()
