"""A perceptron with one hidden layer."""

from collections.abc import Mapping
from typing import Any

import keras
from keras import layers


def build_mlp(
    *,
    image_shape: tuple[int, int, int],
    num_classes: int,
    kernel_initializer: str | Mapping[str, Any] = "glorot_uniform",
) -> keras.Model:
    """Builds one hidden layer of 64: float images `(n, *image_shape)` to `(n, num_classes)`."""
    images = keras.Input(image_shape)
    x = layers.Flatten()(images)
    x = layers.Dense(64, activation="relu", kernel_initializer=kernel_initializer, name="hidden")(x)
    float_type = keras.config.floatx()  # Logits in bfloat16 would make many classes equal.
    logits = layers.Dense(
        num_classes, kernel_initializer=kernel_initializer, dtype=float_type, name="logits"
    )(x)
    return keras.Model(images, logits, name="mlp")
