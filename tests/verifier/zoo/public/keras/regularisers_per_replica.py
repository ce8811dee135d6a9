"""Regularisation losses are computed on each replica, and their gradients are summed.

reference = "keras-team/keras#19891, keras-team/keras#20609, tensorflow/tensorflow#48875"
date = "2024-06"
framework = "keras"

[wrong]
"the penalty of each replica counts in full" = ["regulariser_repeated"]
"model.losses is left out" = ["regulariser_missing"]
"""

import os

import keras
import numpy as np
import tensorflow as tf

import lockstep

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


def build_model():
    penalty = keras.regularizers.L1L2(0.01, 0.05)
    inputs = keras.Input((8, 8, 1))
    x = keras.layers.Conv2D(6, 3, activation="relu", kernel_regularizer=penalty)(inputs)
    x = keras.layers.GlobalAveragePooling2D()(x)
    x = keras.layers.Dense(10, "tanh", kernel_regularizer=keras.regularizers.L2(0.05))(x)
    return keras.Model(inputs, keras.layers.Dense(3)(x))


def main():
    strategy = make_strategy()
    keras.utils.set_random_seed(1)
    random = np.random.default_rng(0)
    images = random.normal(size=(2 * BATCH_SIZE, 8, 8, 1)).astype("float32")
    labels = images[:, 0, :3, 0].argmax(1)
    dataset = tf.data.Dataset.from_tensor_slices((images, labels)).batch(BATCH_SIZE)
    with strategy.scope():
        model, optimizer = build_model(), keras.optimizers.Adam(0.01, epsilon=1e-3)
        cross_entropy = keras.losses.SparseCategoricalCrossentropy(True, reduction="none")

    def replica_step(images, labels):
        with tf.GradientTape() as tape:
            losses = cross_entropy(labels, model(images, training=True))
            loss = tf.nn.compute_average_loss(losses, global_batch_size=BATCH_SIZE)
            penalty = tf.add_n(model.losses)
            if BUG == "the penalty of each replica counts in full":
                loss += penalty
            elif BUG != "model.losses is left out":
                loss += tf.nn.scale_regularization_loss(penalty)
        weights = model.trainable_variables
        optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))

    with lockstep.record(model, optimizer) as recorder:
        recorded = recorder.wrap(replica_step)

        @tf.function
        def train_step(batch):
            strategy.run(recorded, args=batch)

        for batch in strategy.experimental_distribute_dataset(dataset):
            train_step(batch)


if __name__ == "__main__":
    main()
