"""Builds ResNet-9, a residual network that trains in minutes on two CPU cores."""

from collections.abc import Mapping
from typing import Any

import keras
from keras import layers

from models import layers as own

Initializer = str | Mapping[str, Any]  # A name or a configuration.


def build_resnet9(
    *,
    image_shape: tuple[int, int, int],
    num_classes: int,
    kernel_initializer: Initializer = "glorot_uniform",
) -> keras.Model:
    """Builds ResNet-9: float images `(n, *image_shape)` to logits `(n, num_classes)`.

    Eight 3 × 3 convolutions without biases, each followed by BatchNorm and a ReLU, and a dense
    layer: 648,234 parameters for images of `(28, 28, 1)` and 10 classes, and 31 million
    multiplications per image, a fifteenth of ResNet-18's. Three convolutions are followed by 2 × 2
    max pooling, before BatchNorm, which then normalises a quarter of the numbers.

    Args:
        image_shape: height, width and channels of an image.
        num_classes: number of logits.
        kernel_initializer: name or configuration of a Keras initializer.

    Reference: D. Page, "How to Train Your ResNet", 2018, the network of DAWNBench's CIFAR-10
        competition; narrower, and with the first max pooling after the first convolution instead
        of the second.
    """
    images = keras.Input(image_shape)
    x = _convolve(images, 32, kernel_initializer, "stem", halve=True)
    x = _convolve(x, 64, kernel_initializer, "stage0")
    for name, width in [("stage1", 96), ("stage2", 128)]:
        x = _convolve(x, width, kernel_initializer, name, halve=True)
        y = _convolve(x, width, kernel_initializer, f"{name}_block1")
        y = _convolve(y, width, kernel_initializer, f"{name}_block2")
        x = layers.Add()([x, y])
    x = layers.GlobalMaxPooling2D()(x)
    # In the weights' dtype also with mixed precision: bfloat16's 8 significant bits cause ties.
    float_type = keras.config.floatx()
    logits = layers.Dense(
        num_classes, kernel_initializer=kernel_initializer, dtype=float_type, name="logits"
    )(x)
    return keras.Model(images, logits, name="resnet9")


def _convolve(
    x: keras.KerasTensor,
    width: int,
    kernel_initializer: Initializer,
    name: str,
    *,
    halve: bool = False,
) -> keras.KerasTensor:
    """Applies a convolution, 2 × 2 max pooling if `halve` is set, BatchNorm and a ReLU."""
    x = own.Conv2D(
        width,
        3,
        padding="same",
        use_bias=False,  # BatchNorm has a bias.
        kernel_initializer=kernel_initializer,
        name=f"{name}_conv",
    )(x)
    if halve:
        x = layers.MaxPooling2D(2)(x)
    # With Keras' momentum of 0.99, evaluation is off for thousands of steps.
    x = own.BatchNormalization(momentum=0.9, epsilon=1e-5, name=f"{name}_norm")(x)
    return layers.ReLU()(x)
