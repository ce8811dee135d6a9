"""Defines the shortest case: a compiled Keras model and its data.

    .venv/bin/python main.py verify --case=examples/case_minimal.py --num_devices=2

`model` returns a compiled model; `data` returns batches of the global size.
"""

import keras
import numpy as np
import tensorflow as tf


def model() -> keras.Model:
    """Returns a compiled model."""
    network = keras.Sequential([keras.Input((8,)), keras.layers.Dense(1)])
    network.compile(optimizer="sgd", loss="mse")
    return network


def data(global_batch_size: int) -> tf.data.Dataset:
    """Returns batches of 640 examples."""
    x = np.random.default_rng(0).normal(size=(640, 8)).astype(np.float32)
    return tf.data.Dataset.from_tensor_slices((x, x[:, :1])).batch(global_batch_size)
