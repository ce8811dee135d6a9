"""LeNet, in the form that the book trains on several GPUs."""

from typing import Any

import keras
from keras import layers


def build_lenet(*, kernel_initializer: str | dict[str, Any] = "glorot_uniform") -> keras.Model:
    """Builds LeNet: float images `(n, 28, 28, 1)` to logits `(n, 10)`, 129,068 parameters.

    Args:
        kernel_initializer: name or configuration of a Keras initializer, so that each layer makes
            an instance, and draws numbers, of its own.

    Reference: Y. LeCun et al., "Gradient-based learning applied to document recognition", 1998,
        with the ReLUs and the widths of "Dive into Deep Learning", section "Training on Multiple
        GPUs".
    """
    images = keras.Input((28, 28, 1))
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
    # In the weights' own precision, whatever the layers before: 8 bits make many classes equal.
    float_type = keras.config.floatx()
    logits = layers.Dense(
        10, kernel_initializer=kernel_initializer, dtype=float_type, name="logits"
    )(x)
    return keras.Model(images, logits, name="lenet")
