"""Defines a training with Keras' `fit`: dropout, AdamW and clipping by norm.

    .venv/bin/python main.py verify --case=examples/case_fit.py --num_devices=2

As a script, `.venv/bin/python examples/case_fit.py` trains it.
"""

import keras
import numpy as np
import tensorflow as tf


def model() -> keras.Model:
    """Returns a small convolutional network, compiled."""
    network = keras.Sequential(
        [
            keras.Input((28, 28, 1)),
            keras.layers.Rescaling(1 / 255),
            keras.layers.Conv2D(8, 5, strides=2, activation="relu"),
            keras.layers.Flatten(),
            keras.layers.Dropout(0.3, seed=1),
            keras.layers.Dense(10),
        ],
        name="convolutions",
    )
    network.compile(
        optimizer=keras.optimizers.AdamW(1e-3, weight_decay=1e-2, clipnorm=0.1),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    return network


def data(global_batch_size: int) -> tf.data.Dataset:
    """Returns batches of 1000 random images and labels."""
    generator = np.random.default_rng(0)
    images = generator.integers(0, 256, (1000, 28, 28, 1), np.uint8)
    labels = generator.integers(0, 10, 1000)
    dataset = tf.data.Dataset.from_tensor_slices((images, labels))
    return dataset.shuffle(1000, seed=1).batch(global_batch_size)


if __name__ == "__main__":
    with tf.distribute.MirroredStrategy().scope():
        network = model()
    network.fit(data(256), epochs=2)
