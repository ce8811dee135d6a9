"""Counts the floating-point operations of layers, to balance the stages of a pipeline."""

from collections.abc import Iterator

import keras
import numpy as np


def product_layers(model: keras.Model) -> Iterator[keras.layers.Layer]:
    """Yields the convolution and dense layers in order, including those of nested models."""
    for layer in model.layers:
        if isinstance(layer, keras.Model):
            yield from product_layers(layer)
        elif isinstance(layer, keras.layers.Conv2D | keras.layers.Dense):
            yield layer


def forward_flops(layer: keras.layers.Layer) -> float:
    """Returns the multiplications and additions of a layer's forward pass per example.

    Counts only convolutions and matrix products, as is usual; other layers are 0.
    """
    if not isinstance(layer, keras.layers.Conv2D | keras.layers.Dense):
        return 0.0
    positions = np.prod(layer.output.shape[1:-1])  # 1 for a dense layer.
    return float(2 * positions * np.prod(layer.kernel.shape))
