"""Checks that all strategies can train a model equally."""

import collections

import keras

from app.runtime.errors import ConfigError


def check_model(model: keras.Model) -> None:
    """Checks a newly built model; does not change its variables.

    Raises:
        ConfigError: two variables have the same name, or a layer adds a loss.
    """
    counts = collections.Counter(variable.path for variable in model.variables)
    repeated = [path for path, count in counts.items() if count > 1]
    if repeated:
        raise ConfigError(
            f"model {model.name}: {counts[repeated[0]]} variables are named {repeated[0]}; give"
            " each layer a name of its own"
        )
    layer = _find_added_loss(model)
    if layer is not None:
        raise ConfigError(
            f"model {model.name}: layer {layer.name} adds a loss of its own, which training would"
            " leave out; remove its regularizers and add_loss, and use the weight decay of a"
            " recipe"
        )


def _find_added_loss(model: keras.Model) -> keras.Layer | None:
    """Returns the innermost layer that adds a loss in a call of the model; None without one.

    Weight regularizers are found without a call. Activity regularizers and losses added by layers
    are not; the model is therefore called with one image in evaluation mode, which changes no
    variable.
    """
    model(keras.ops.zeros((1, *model.input_shape[1:]), dtype=model.inputs[0].dtype), training=False)
    layer = model if model.losses else None
    while inner := [each for each in getattr(layer, "layers", ()) if each.losses]:
        layer = inner[0]
    return layer
