"""How much arithmetic a model needs: what speed can be held against the machine's limit with."""

from collections.abc import Iterator

import keras
import numpy as np


def product_layers(model: keras.Model) -> Iterator[keras.layers.Layer]:
    """Yields the layers that multiply matrices, models inside the model included, in order."""
    for layer in model.layers:
        if isinstance(layer, keras.Model):
            yield from product_layers(layer)
        elif isinstance(layer, keras.layers.Conv2D | keras.layers.Dense):
            yield layer


def training_flops_per_example(model: keras.Model) -> float:
    """Counts multiplications and additions of training on one example.

    Convolutions and matrix products alone, as is usual: each costs as much again for the gradient
    of its weights, and once more for that of its input, which the first of them does not need.
    """
    products = [forward_flops(layer) for layer in product_layers(model)]
    return 3 * sum(products) - products[0] if products else 0.0


def forward_flops(layer: keras.layers.Layer) -> float:
    """Counts those of a layer's forward pass on one example; 0 where it multiplies no matrices."""
    if not isinstance(layer, keras.layers.Conv2D | keras.layers.Dense):
        return 0.0
    positions = np.prod(layer.output.shape[1:-1])  # Of a dense layer there is one.
    return float(2 * positions * np.prod(layer.kernel.shape))
