"""Describes models: their variables and their layers."""

import contextlib
import math
from collections.abc import Collection, Sequence
from typing import Any

import keras
import tensorflow as tf

from lockstep.data.trace import SEED, STATISTIC, WEIGHT
from lockstep.recorders.keras.private import layers_in, layers_of
from lockstep.recorders.keras.values import is_seed

# Also read from layers that cannot be saved, which have no configuration.
_SETTINGS = ("epsilon", "momentum", "strides", "padding", "dilation_rate", "rate", "synchronized")
_MOST_NUMBERS, _MOST_LETTERS = 8, 200  # Of a setting.


class Models(keras.Model):
    """Has the variables of several models."""

    def __init__(self, models: Sequence[keras.Model]):
        super().__init__(name="_and_".join(model.name for model in models))
        self.models = list(models)
        paths = [variable.path for variable in self.variables]
        if repeated := [path for path in paths if paths.count(path) > 1]:
            raise ValueError(f"several models have {repeated[0]}; give their layers other names")


def as_one(model: keras.Model | Sequence[keras.Model]) -> keras.Model:
    """Returns a model, or one that has the variables of several and their strategy."""
    if isinstance(model, keras.Model):
        return model
    with model[0].distribute_strategy.scope():
        return Models(model)


def _settings_of(layer: keras.Layer) -> dict[str, Any]:
    """Returns the settings of a layer that are numbers or words, as a slope or a rank."""
    config = {key: getattr(layer, key) for key in _SETTINGS if hasattr(layer, key)}
    if not isinstance(layer, keras.layers.InputLayer):
        with contextlib.suppress(NotImplementedError):
            config |= layer.get_config()
    return {
        key: value for key, value in config.items()
        if key not in ("name", "trainable", "dtype", "seed") and _is_plain(value)
    }  # fmt: skip


def _is_plain(value: Any) -> bool:
    """Returns whether a setting is a number, a word or some numbers: no vocabulary."""
    if isinstance(value, tuple | list):
        return len(value) <= _MOST_NUMBERS and all(isinstance(x, bool | int | float) for x in value)
    is_word = isinstance(value, str) and value.isprintable() and len(value) <= _MOST_LETTERS
    return is_word or isinstance(value, bool | int | float)


def described_layers(model: keras.Model) -> list[dict[str, Any]]:
    """Returns name, class, weights and settings of the layers without layers in them."""
    return [
        _settings_of(layer)
        | {"name": layer.name, "class": type(layer).__name__}
        | {"weights": [weight.path for weight in layer.weights]}
        for layer in layers_of(model, include_self=False)
        if not layers_in(layer)
    ]


def layouts_of(model: keras.Model) -> dict[str, str]:
    """Returns weight → layout of its axes."""
    layouts = dict[str, str]()
    for layer in layers_of(model, include_self=False):
        if isinstance(layer, keras.layers.Conv2D | keras.layers.Dense):
            # With `enable_lora`, `layer.kernel` is a sum, and no variable.
            kernels = [weight for weight in layer.weights if weight.name == "kernel"]
            layouts |= {x.path: "IO" if len(x.shape) == 2 else "HWIO" for x in kernels}
    return layouts


def described_variables(model: keras.Model, updated: Collection[str]) -> list[dict[str, str]]:
    """Describes the variables of a model, of which an optimizer has the weights `updated`."""
    layouts = layouts_of(model)
    weights = {*updated, *(weight.path for weight in model.trainable_variables)}
    found = []
    for variable in model.variables:
        kind = WEIGHT if variable.path in weights else STATISTIC
        kind = SEED if is_seed(variable) else kind
        layout = layouts.get(variable.path, "")
        found.append({"name": variable.path, "kind": kind, "layout": layout})
    return found


def is_frozen(layer: keras.Layer) -> bool:
    """Returns whether a BatchNorm layer normalises with its moving statistics in training, too."""
    return isinstance(layer, keras.layers.BatchNormalization) and not layer.trainable


def computed_in(model: keras.Model) -> str:
    """Returns the 16-bit dtype in which layers with weights compute, or ""."""
    dtypes = {layer.compute_dtype for layer in layers_of(model) if layer.weights}
    return next((dtype for dtype in ("float16", "bfloat16") if dtype in dtypes), "")


def size_of_weights(model: keras.Model) -> int:
    """Returns the bytes of one copy of all weights."""
    weights = [(math.prod(w.shape), tf.as_dtype(w.dtype).size) for w in model.weights]
    return sum(number * size for number, size in weights)
