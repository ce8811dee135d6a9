"""Defines ResNet-18 on Fashion-MNIST as a case: `--case=resnet18`; `resnet18:d2l`."""

import keras

from app.training.builtin_case import BuiltInCase

__all__ = ["d2l", "data", "model"]

_case = BuiltInCase("resnet18")
data = _case.data


def model() -> keras.Model:
    """Returns the model with the recipe `fast`."""
    return _case.build_model("fast")


def d2l() -> keras.Model:
    """Returns the model with the recipe `d2l`."""
    return _case.build_model("d2l")
