"""ResNet-18 on Fashion-MNIST as a case: `--case=resnet18`; `resnet18:d2l` as in the textbook."""

import keras

from app.training.builtin_case import build_compiled_model, data_to_evaluate, train_data

__all__ = ["d2l", "data", "model", "test_data"]

data = train_data("resnet18")
test_data = data_to_evaluate


def model() -> keras.Model:
    """Returns the model with the recipe `fast`."""
    return build_compiled_model("resnet18", "fast")


def d2l() -> keras.Model:
    """Returns the model with the recipe `d2l`."""
    return build_compiled_model("resnet18", "d2l")
