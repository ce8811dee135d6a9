"""Handles the metrics of a compiled Keras model as values instead of variables.

A strategy passes the metric states from batch to batch, so that an evaluation changes no variable.
"""

from collections.abc import Sequence

import keras
import numpy as np
import tensorflow as tf


def initial_metric_states(model: keras.Model) -> list[tf.Tensor]:
    """Returns the states of a model's metrics before the first batch."""
    return [_first_copy(variable) for variable in model.metrics_variables]


def metric_values(model: keras.Model, states: Sequence[tf.Tensor]) -> dict[str, float]:
    """Returns name → value of a model's metrics, without the loss.

    A metric with several values has one entry per value: `name[0]`, `name[1]`, and so on.

    Args:
        model: defines the metrics.
        states: states of the metrics after the last batch.
    """
    with keras.StatelessScope(list(zip(model.metrics_variables, states, strict=True))):
        results = model.get_metrics_result()
    values: dict[str, float] = {}
    for name, value in results.items():
        numbers = np.ravel(value)
        names = [name] if len(numbers) == 1 else [f"{name}[{i}]" for i in range(len(numbers))]
        values |= dict(zip(names, map(float, numbers), strict=True))
    values.pop("loss", None)
    return values


def _first_copy(variable: keras.Variable) -> tf.Tensor:
    """Returns the value of a variable; with `tf.distribute`, the value on the first device."""
    values = getattr(variable.value, "values", [variable.value])
    return tf.convert_to_tensor(values[0])
