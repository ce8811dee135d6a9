"""Keras' `compile` and `fit` with MirroredStrategy on logical CPU devices."""

import keras
import numpy as np
import tensorflow as tf
from launch import arguments

from lockstep import record_keras

BATCH_SIZE = 12


def get_compiled_model(num_replicas):
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


def get_dataset(num_replicas):
    random = np.random.default_rng(0)
    x = random.normal(size=(36, 6)).astype("float32")
    y = np.sin(x[:, :2] + x[:, 2:4])
    dataset = tf.data.Dataset.from_tensor_slices((x, y))
    return dataset.batch(BATCH_SIZE)


def main():
    num_replicas, recording = arguments()
    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(
        cpu, [tf.config.LogicalDeviceConfiguration()] * num_replicas
    )
    strategy = tf.distribute.MirroredStrategy(
        [f"CPU:{i}" for i in range(num_replicas)],
        cross_device_ops=tf.distribute.ReductionToOneDevice(),
    )
    with strategy.scope():
        model = get_compiled_model(num_replicas)
    with record_keras.record(model=model, steps=3, **recording):
        model.fit(get_dataset(num_replicas), epochs=1, verbose=0)


if __name__ == "__main__":
    main()
