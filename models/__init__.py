"""Lists the models by name; to add one, add a file here and a line to `MODELS`.

Importing this package imports neither Keras nor TensorFlow: `load_model_builder` imports the module
of a builder.
"""

import pkgutil
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import keras

# Name of a model → "module:builder".
MODELS: dict[str, str] = {
    "lenet": "models.lenet:build_lenet",
    "resnet18": "models.resnet:build_resnet18",
}


def load_model_builder(name: str) -> "Callable[..., keras.Model]":
    """Imports and returns the builder of a model.

    Args:
        name: a key of `MODELS`.

    Raises:
        ImportError: the entry of `MODELS` does not name a function.
    """
    target = MODELS[name]
    try:
        builder = pkgutil.resolve_name(target)
    except (ImportError, AttributeError, ValueError) as error:
        raise ImportError(f'MODELS["{name}"] = "{target}": {error}') from error
    if not callable(builder):
        raise ImportError(f'MODELS["{name}"] = "{target}": must be "module:builder"')
    return builder
