"""Builds the LeNet of "Dive into Deep Learning", section "Training on Multiple GPUs"."""

from collections.abc import Mapping
from typing import Any

import keras
from keras import layers


def build_lenet(
    *,
    image_shape: tuple[int, int, int],
    num_classes: int,
    kernel_initializer: str | Mapping[str, Any] = "glorot_uniform",
) -> keras.Model:
    """Builds LeNet: float images `(n, *image_shape)` to logits `(n, num_classes)`.

    It has 129,068 parameters for images of `(28, 28, 1)` and 10 classes.

    Args:
        image_shape: height, width and channels of an image.
        num_classes: number of logits.
        kernel_initializer: name or configuration of a Keras initializer, from which each layer
            creates its own instance with its own random numbers.

    Reference: Y. LeCun et al., "Gradient-based learning applied to document recognition", 1998,
        with the ReLUs and the widths of "Dive into Deep Learning", section "Training on Multiple
        GPUs".
    """
    images = keras.Input(image_shape)
    x = images
    for name, width, size in [("conv1", 20, 3), ("conv2", 50, 5)]:
        x = layers.Conv2D(
            width, size, activation="relu", kernel_initializer=kernel_initializer, name=name
        )(x)
        x = layers.AveragePooling2D(2)(x)
    x = layers.Flatten()(x)
    x = layers.Dense(128, activation="relu", kernel_initializer=kernel_initializer, name="hidden")(
        x
    )
    # In the weights' dtype also with mixed precision: bfloat16's 8 significant bits cause ties.
    float_type = keras.config.floatx()
    logits = layers.Dense(
        num_classes, kernel_initializer=kernel_initializer, dtype=float_type, name="logits"
    )(x)
    return keras.Model(images, logits, name="lenet")
