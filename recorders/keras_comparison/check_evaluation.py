"""Compares an evaluation with one device."""

import warnings
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import tree

from .distances import EPS, MARGIN, ratio_of, same_bits
from .findings import BY_DESIGN, FAULT, Finding
from .recorder_imports import is_float, leaves


def compare_evaluation(
    logs: Mapping[str, float],
    model: keras.Model,
    states: Sequence[Sequence[np.ndarray]],
    dataset: tf.data.Dataset,
) -> list[Finding]:
    """Compares loss and metrics of `evaluate` under a strategy with those of one device.

    Args:
        logs: result of `model.evaluate(..., return_dict=True)` under the strategy.
        model: the model compiled by the same code, outside of the strategy's scope.
        states: variables of the model, then of its optimizer, for each replica, in the evaluation.
        dataset: the batches of the evaluation, each example once.
    """

    logs, expected = numbers(logs), numbers(_evaluate(model, states[0], dataset))
    drawn = [
        variable.path
        for variable, array in zip(model.variables, states[0], strict=False)
        if not is_float(variable) and not same_bits(np.asarray(variable), array)
    ]
    apart = {n: ratio_of(abs(logs[n] - value), abs(value)) for n, value in expected.items()}
    allowed = MARGIN * 16 * EPS  # For means over some thousand numbers in another order.
    wrong = [name for name, by in apart.items() if not by <= allowed]
    if not wrong:
        return []
    text = "; ".join(f"{n} is {logs[n]:.6g}, one device has {expected[n]:.6g}" for n in wrong)
    # A wrongly summed metric does not affect the loss; wrong examples change both.
    status, cause = FAULT, "other_evaluation" if "loss" in wrong else "other_metric"
    if "loss" in wrong and not all(map(same_bits, states[0], states[-1])):
        local = _loss_of_local_states(model, states, dataset)
        if ratio_of(abs(logs["loss"] - local), abs(local)) <= allowed:
            status, cause = BY_DESIGN, "local_statistics"
            text += "; each replica evaluates with different moving statistics"
    if drawn:  # Replicas, and other orders of examples, use different random numbers.
        status, cause = BY_DESIGN, "random_evaluation"
        text += f"; the evaluation draws random numbers from {drawn[0]}"
    by = max(apart[name] for name in wrong)
    return [Finding("evaluation", status, cause, text, (0,), (), tuple(wrong), by, allowed)]


def _evaluate(
    model: keras.Model, state: Sequence[np.ndarray], batches: tf.data.Dataset
) -> dict[str, float]:
    """Evaluates a model from a state."""
    variables = [*model.variables, *model.optimizer.variables]
    for variable, array in zip(variables, state, strict=True):
        variable.assign(tf.cast(array, variable.dtype))
    with warnings.catch_warnings():
        # Keras warns at the end of a dataset of unknown size, such as a shard.
        warnings.filterwarnings("ignore", message="Your input ran out of data")
        return model.evaluate(batches, verbose=0, return_dict=True)


def _loss_of_local_states(
    model: keras.Model, states: Sequence[Sequence[np.ndarray]], dataset: tf.data.Dataset
) -> float:
    """Returns the loss of a dataset whose shards are evaluated with the replicas' states."""
    shards = shards_of(dataset, len(states))
    sizes = [sum(len(leaves(batch)[0]) for batch in shard) for shard in shards]
    losses = [
        _evaluate(model, state, shard)["loss"] if size else 0.0
        for state, shard, size in zip(states, shards, sizes, strict=True)
    ]
    return float(np.average(losses, weights=sizes))


def numbers(logs: Mapping[str, Any]) -> dict[str, float]:
    """Returns all numbers in logs; a metric with several numbers has one entry for each."""
    found: dict[str, float] = {}
    for name, value in logs.items():
        numbers = np.ravel(value)
        names = [name] if len(numbers) == 1 else [f"{name}[{i}]" for i in range(len(numbers))]
        found |= dict(zip(names, map(float, numbers), strict=True))
    return found


def shards_of(dataset: tf.data.Dataset, num_replicas: int) -> list[tf.data.Dataset]:
    """Splits each batch into one part per replica, as `MirroredStrategy` does."""

    def part(replica: int, *batch: Any) -> Any:
        size = -(-tf.shape(leaves(batch)[0])[0] // num_replicas)
        cut = tree.map_structure(lambda leaf: leaf[replica * size : (replica + 1) * size], batch)
        return cut if len(cut) > 1 else cut[0]

    parts = [dataset.map(partial(part, replica)) for replica in range(num_replicas)]
    return [shard.filter(lambda *batch: tf.shape(leaves(batch)[0])[0] > 0) for shard in parts]
