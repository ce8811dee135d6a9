"""Keras' `compile` and `fit` with MirroredStrategy on logical CPU devices."""

import os

import keras
import numpy as np
import tensorflow as tf

from cases import harness

DEVICES = int(os.environ.get("DEVICES", 1))
BATCH_SIZE = 12


def get_compiled_model():
    keras.utils.set_random_seed(1)
    inputs = keras.Input((6,))
    x = keras.layers.Dense(8, activation="tanh", name="dense_1")(inputs)
    outputs = keras.layers.Dense(2, name="dense_2")(x)
    model = keras.Model(inputs, outputs)
    model.compile(
        optimizer=keras.optimizers.Adam(1e-2),
        loss=keras.losses.MeanSquaredError(),
    )
    return model


def get_dataset():
    random = np.random.default_rng(0)
    x = random.normal(size=(36, 6)).astype("float32")
    y = np.sin(x[:, :2] + x[:, 2:4])
    dataset = tf.data.Dataset.from_tensor_slices((x, y))
    return dataset.batch(BATCH_SIZE)


def main():
    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(
        cpu, [tf.config.LogicalDeviceConfiguration()] * DEVICES
    )
    strategy = tf.distribute.MirroredStrategy(
        [f"CPU:{i}" for i in range(DEVICES)],
        cross_device_ops=tf.distribute.ReductionToOneDevice(),
    )
    with strategy.scope():
        model = get_compiled_model()
    with harness.training(model):
        model.fit(get_dataset(), epochs=1, verbose=0)


if __name__ == "__main__":
    main()
