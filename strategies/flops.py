"""Counts the floating-point operations of a model, to compare its speed with the device's peak."""

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


def training_flops_per_example(model: keras.Model) -> float:
    """Returns the multiplications and additions of a training step per example.

    Counts only convolutions and matrix products, as is usual. The gradients by weights and by input
    each cost as much as the forward pass; the first layer needs no gradient by its input.
    """
    products = [forward_flops(layer) for layer in product_layers(model)]
    return 3 * sum(products) - products[0] if products else 0.0


def forward_flops(layer: keras.layers.Layer) -> float:
    """Returns the operations of a layer's forward pass per example; 0 for other layers."""
    if not isinstance(layer, keras.layers.Conv2D | keras.layers.Dense):
        return 0.0
    positions = np.prod(layer.output.shape[1:-1])  # 1 for a dense layer.
    return float(2 * positions * np.prod(layer.kernel.shape))
