"""Layers of a model, their random numbers and dtypes."""

import keras

from .distances import EPS, same_bits
from .recorder_imports import Recording


def is_seed_of(layer: keras.layers.Layer, variable: keras.Variable) -> bool:
    """Returns whether a variable is a seed of a layer."""
    return any(generator.state is variable for generator in layer._seed_generators)


def leaf_layers(model: keras.Model) -> list[keras.layers.Layer]:
    """Returns the layers that contain no other layers."""
    return [layer for layer in model._flatten_layers(include_self=False) if not layer._layers]


def unit_of(dtype: str) -> float:
    """Returns the largest step between numbers near 1."""
    return {"bfloat16": 2.0**-7, "float16": 2.0**-10}.get(dtype, EPS)


def seeds_drawn(recording: Recording) -> set[int]:
    """Returns the indices of the variables that are seeds used by a step."""
    return {
        index
        for step in recording.steps
        for index, variable in enumerate(recording.variables)
        if variable["kind"] == "seed"
        and not same_bits(step["before", 0][index], step["after", 0][index])
    }
