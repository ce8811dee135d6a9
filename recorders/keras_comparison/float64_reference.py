"""Builds the reference in float64."""

from collections.abc import Callable

import keras

from .distances import EPS
from .layers import leaf_layers
from .modes import in_float64
from .recorder_imports import Recording
from .reference_model import OneDevice


def build_in_float64(
    build: Callable[[], keras.Model], recording: Recording, one: OneDevice
) -> tuple[OneDevice | None, str]:
    """Returns the same model in float64, or None and the reason."""
    if one.random_layers:
        return None, "the model has random layers"
    if one.unit > EPS:
        return None, "the model does not compute in float32"
    try:
        with in_float64():
            model = build()
            exact = OneDevice(model, recording, is_float64=True)
        first = recording.steps[0]
        exact.step(first["before", 0], first["data", 0])
    except Exception as error:  # From the user's code, which may require float32.
        return None, f"{type(error).__name__} in float64"
    with_weights = [layer for layer in leaf_layers(model) if layer.weights]
    if any(layer.compute_dtype != "float64" for layer in with_weights):
        return None, "the model sets its own dtype"
    return exact, ""
