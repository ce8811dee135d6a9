"""Defines LeNet on Fashion-MNIST as a case: `--case=lenet`; `lenet:d2l` with the recipe `d2l`."""

import keras

from app.training.builtin_case import BuiltInCase

__all__ = ["d2l", "data", "model"]

_case = BuiltInCase("lenet")
data = _case.data


def model() -> keras.Model:
    """Returns the model with the recipe `fast`."""
    return _case.build_model("fast")


def d2l() -> keras.Model:
    """Returns the model with the recipe `d2l`."""
    return _case.build_model("d2l")
