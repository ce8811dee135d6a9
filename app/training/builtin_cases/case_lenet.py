"""LeNet on Fashion-MNIST as a case: `--case=lenet`; `lenet:d2l` with the textbook's recipe."""

import keras

from app.training.builtin_case import build_compiled_model, data_to_evaluate, train_data

__all__ = ["d2l", "data", "model", "test_data"]

data = train_data("lenet")
test_data = data_to_evaluate


def model() -> keras.Model:
    """Returns the model with the recipe `fast`."""
    return build_compiled_model("lenet", "fast")


def d2l() -> keras.Model:
    """Returns the model with the recipe `d2l`."""
    return build_compiled_model("lenet", "d2l")
