"""Converts recorded arrays and tensors, and nests and their descriptions."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from .recorder_imports import Sparse, to_numpy_dtype


def from_json(description: Any, values: Sequence[Any]) -> Any:
    """Returns the nest that `to_json` describes, with these leaves."""
    if isinstance(description, dict):
        ((kind, content),) = description.items()
        if kind == "dict":
            return {key: from_json(value, values) for key, value in content.items()}
        built = [from_json(value, values) for value in content]
        return built if kind == "list" else tuple(built)
    return None if description is None else values[description]


def to_tf(gradient: Any) -> Any:
    """Returns a recorded gradient as a tensor."""
    if not isinstance(gradient, Sparse):
        return tf.constant(gradient)
    shape = (int(gradient.rows), *gradient.values.shape[1:])
    return tf.IndexedSlices(tf.constant(gradient.values), tf.constant(gradient.indices), shape)


def to_numpy(gradient: Any) -> Any:
    """Returns a gradient in the recorded form."""
    if not isinstance(gradient, tf.IndexedSlices):
        return np.array(to_numpy_dtype(gradient))
    values, indices = np.array(to_numpy_dtype(gradient.values)), gradient.indices.numpy()
    return Sparse(values, indices, int(gradient.dense_shape[0]))
