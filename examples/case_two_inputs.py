"""Defines a model with two inputs, two outputs and sample weights, averaged by weight.

    .venv/bin/python main.py verify --case=examples/case_two_inputs.py --num_devices=2

`reduction="mean_with_sample_weight"` divides by the weights of a replica's own examples. With the
default reduction, `--case=…:corrected`, replicas and one device train alike.
"""

import keras
import numpy as np
import tensorflow as tf


def model(reduction: str = "mean_with_sample_weight") -> keras.Model:
    """Returns a model with the loss reduction `reduction`."""
    image, tags = keras.Input((16,), name="image"), keras.Input((4,), name="tags")
    joined = keras.layers.Concatenate()([image, tags])
    hidden = keras.layers.Dense(12, activation="relu")(joined)
    network = keras.Model(
        {"image": image, "tags": tags},
        {
            "price": keras.layers.Dense(1, name="price")(hidden),
            "age": keras.layers.Dense(1, name="age")(hidden),
        },
    )
    network.compile(
        optimizer=keras.optimizers.Adam(1e-2),
        loss={
            "price": keras.losses.MeanSquaredError(reduction=reduction),
            "age": keras.losses.MeanAbsoluteError(reduction=reduction),
        },
        loss_weights={"price": 1.0, "age": 0.5},
    )
    return network


def corrected() -> keras.Model:
    """Returns the model with the default reduction."""
    return model(reduction="sum_over_batch_size")


def data(global_batch_size: int) -> tf.data.Dataset:
    """Returns batches of 600 examples with a weight for each output."""
    generator = np.random.default_rng(0)

    def numbers(*shape: int) -> np.ndarray:
        return generator.normal(size=shape).astype(np.float32)

    x = {"image": numbers(600, 16), "tags": numbers(600, 4)}
    y = {"price": numbers(600, 1), "age": numbers(600, 1)}
    weights = {name: generator.uniform(0.1, 2, 600).astype(np.float32) for name in y}
    return tf.data.Dataset.from_tensor_slices((x, y, weights)).batch(global_batch_size)
