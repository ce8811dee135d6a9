"""What a model must be for every strategy to train it the same way."""

import collections

import keras

from app.runtime.errors import ConfigError


def check_model(model: keras.Model) -> None:
    """Checks a model that was just built; leaves its variables as they are.

    Raises:
        ConfigError: two variables have the same name, or a layer adds a loss of its own.
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
    """Returns the innermost layer that adds a loss in a call of the model, None where none does.

    Regularizers of weights are found without a call. Those of activities, and what a layer adds by
    itself, are not: hence a call with one image, as in evaluation, which changes no variable.
    """
    model(keras.ops.zeros((1, *model.input_shape[1:]), dtype=model.inputs[0].dtype), training=False)
    layer = model if model.losses else None
    while inner := [each for each in getattr(layer, "layers", ()) if each.losses]:
        layer = inner[0]
    return layer
