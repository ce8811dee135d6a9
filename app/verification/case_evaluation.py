"""Compares an evaluation under a strategy with one device."""

import contextlib
import functools
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from lockstep.answer.verdict import Finding
from lockstep.numeric.arrays import same_bits
from lockstep.recorders.keras.values import is_float, leaves
from lockstep.stages.evaluation import check_evaluation

State = Sequence[np.ndarray]  # All variables of a replica.


def compare_evaluation(
    logs: Mapping[str, Any], model: keras.Model, states: Sequence[State], dataset: tf.data.Dataset
) -> list[Finding]:
    """Compares loss and metrics of `evaluate` under a strategy with those of one device.

    Args:
        logs: result of `model.evaluate(..., return_dict=True)` under the strategy.
        model: the model compiled by the same code, outside of the strategy's scope.
        states: variables of the model, then of its optimizer, for each replica, in the evaluation.
        dataset: the batches of the evaluation, each example once.
    """
    expected = _numbers(_evaluate(model, states[0], dataset))
    drawn = [
        variable.path
        for variable, array in zip(model.variables, states[0], strict=False)
        if not is_float(variable) and not same_bits(np.asarray(variable), array)
    ]

    def loss_of_local_states() -> float:
        """Returns the loss of a dataset whose shards are evaluated with the replicas' states."""
        shards = _shards_of(dataset, len(states))
        sizes = [sum(len(leaves(batch)[0]) for batch in shard) for shard in shards]
        losses = [
            _evaluate(model, state, shard)["loss"] if size else 0.0
            for state, shard, size in zip(states, shards, sizes, strict=True)
        ]
        return float(np.average(losses, weights=sizes))

    differ = not all(map(same_bits, states[0], states[-1]))
    local = loss_of_local_states if differ else None
    return check_evaluation(_numbers(logs), expected, drawn=drawn, loss_of_local_states=local)


def _evaluate(model: keras.Model, state: State, batches: tf.data.Dataset) -> dict[str, Any]:
    """Evaluates a model from a state."""
    variables = [*model.variables, *model.optimizer.variables]
    for variable, array in zip(variables, state, strict=True):
        variable.assign(tf.cast(array, variable.dtype))
    with no_warning_of_the_end():
        return model.evaluate(batches, verbose=0, return_dict=True)


@contextlib.contextmanager
def no_warning_of_the_end() -> Iterator[None]:
    """Hides Keras' warning at the end of a part of a dataset."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Your input ran out of data")
        yield


def _numbers(logs: Mapping[str, Any]) -> dict[str, float]:
    """Returns all numbers in logs; a metric with several numbers has one entry for each."""
    found: dict[str, float] = {}
    for name, value in logs.items():
        numbers = np.ravel(value)
        names = [name] if len(numbers) == 1 else [f"{name}[{i}]" for i in range(len(numbers))]
        found |= dict(zip(names, map(float, numbers), strict=True))
    return found


@tf.autograph.experimental.do_not_convert
def _shards_of(dataset: tf.data.Dataset, num_replicas: int) -> list[tf.data.Dataset]:
    """Splits each batch into one part per replica, as `MirroredStrategy` does."""

    def part(replica: int, *batch: Any) -> Any:
        size = -(-tf.shape(leaves(batch)[0])[0] // num_replicas)
        rows = slice(replica * size, (replica + 1) * size)
        cut = keras.tree.map_structure(lambda leaf: leaf[rows], batch)
        return cut if len(cut) > 1 else cut[0]

    parts = [dataset.map(functools.partial(part, replica)) for replica in range(num_replicas)]
    return [shard.filter(lambda *batch: tf.shape(leaves(batch)[0])[0] > 0) for shard in parts]
