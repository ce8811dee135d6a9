"""Builds residual networks for small images.

Convolutions and BatchNorm are those of `layers.py`: Keras' layers, in less time on CPUs.
"""

from collections.abc import Sequence
from typing import Any

import keras
from keras import layers

from models import layers as own

Initializer = str | dict[str, Any]  # A name or a configuration.


def build_resnet18(
    *,
    image_shape: tuple[int, int, int],
    num_classes: int,
    kernel_initializer: Initializer = "glorot_uniform",
) -> keras.Model:
    """Builds the ResNet-18 of "Dive into Deep Learning"; see `build_resnet`.

    It has 11,175,818 trainable parameters for images of one channel and 10 classes.
    """
    return build_resnet(
        name="resnet18",
        image_shape=image_shape,
        num_classes=num_classes,
        stage_widths=(64, 128, 256, 512),
        blocks_per_stage=2,
        kernel_initializer=kernel_initializer,
    )


def build_resnet(
    *,
    name: str,
    image_shape: tuple[int, int, int],
    num_classes: int,
    stage_widths: Sequence[int],
    blocks_per_stage: int,
    kernel_initializer: Initializer = "glorot_uniform",
) -> keras.Model:
    """Builds a residual network: float images `(n, *image_shape)` to logits `(n, num_classes)`.

    The stem is a 3 × 3 convolution with stride 1 and without pooling, for small images. Each stage
    but the first halves height and width. Convolutions have biases.

    Args:
        name: the model's name.
        image_shape: height, width and channels of an image.
        num_classes: number of logits.
        stage_widths: channels of each stage; the stem has as many as the first stage.
        blocks_per_stage: residual blocks in a stage.
        kernel_initializer: name or configuration of a Keras initializer.

    Reference: K. He et al., "Deep Residual Learning for Image Recognition", 2015, in the variant
        of "Dive into Deep Learning", section "Concise Implementation for Multiple GPUs".
    """
    images = keras.Input(image_shape)
    x = _conv(stage_widths[0], 3, 1, kernel_initializer, "stem_conv")(images)
    x = _batch_norm("stem_norm")(x)
    x = layers.ReLU()(x)
    for stage, width in enumerate(stage_widths):
        for block in range(blocks_per_stage):
            halve = stage > 0 and block == 0
            x = _residual_block(x, width, halve, kernel_initializer, f"stage{stage}_block{block}")
    x = layers.GlobalAveragePooling2D()(x)
    # In the weights' dtype also with mixed precision: bfloat16's 8 significant bits cause ties.
    float_type = keras.config.floatx()
    logits = layers.Dense(
        num_classes, kernel_initializer=kernel_initializer, dtype=float_type, name="logits"
    )(x)
    return keras.Model(images, logits, name=name)


def _residual_block(
    x: keras.KerasTensor,
    width: int,
    halve: bool,
    kernel_initializer: Initializer,
    name: str,
) -> keras.KerasTensor:
    """Adds two 3 × 3 convolutions to a shortcut, with a 1 × 1 convolution if the shape changes."""
    strides = 2 if halve else 1
    y = _conv(width, 3, strides, kernel_initializer, f"{name}_conv1")(x)
    y = _batch_norm(f"{name}_norm1")(y)
    y = layers.ReLU()(y)
    y = _conv(width, 3, 1, kernel_initializer, f"{name}_conv2")(y)
    y = _batch_norm(f"{name}_norm2")(y)
    if halve:
        x = _conv(width, 1, strides, kernel_initializer, f"{name}_shortcut")(x)
    return layers.ReLU()(layers.Add()([y, x]))


def _conv(
    width: int, size: int, strides: int, kernel_initializer: Initializer, name: str
) -> layers.Layer:
    return own.Conv2D(
        width,
        size,
        strides=strides,
        padding="same",
        kernel_initializer=kernel_initializer,
        name=name,
    )


def _batch_norm(name: str) -> layers.Layer:
    # The paper's momentum; with Keras' 0.99, evaluation is off for thousands of steps.
    return own.BatchNormalization(momentum=0.9, epsilon=1e-5, name=name)
