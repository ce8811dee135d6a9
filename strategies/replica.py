"""Defines the replica: a copy of the weights on a device."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf


class Replica(NamedTuple):
    """Holds a copy of the weights that is trained on one part of each global batch.

    Attributes:
        replica_id: in 0 to R - 1, an int or an int scalar tensor.
        device: device name; "" if `tf.distribute` places the replica.
        model: the model on this device.
        optimizer: the optimizer on this device.
        statistics: for each of its shards, variables that replace the model's non-trainable ones;
            empty if the only shard uses the model's.
        weights: tensors that replace the model's trainable variables; None to use the model's.
    """

    replica_id: int | tf.Tensor
    device: str
    model: keras.Model
    optimizer: keras.optimizers.Optimizer
    statistics: Sequence[Sequence[keras.Variable]] = ()
    weights: Sequence[tf.Tensor] | None = None

    def values(self, index: int) -> list[tuple[keras.Variable, tf.Tensor | tf.Variable]]:
        """Returns (variable of the model, its replacement) pairs for the `index`-th shard."""
        values: list[tuple[keras.Variable, Any]] = []
        if self.weights:
            values += zip(self.model.trainable_variables, self.weights, strict=True)
        if self.statistics:
            own = [variable.value for variable in self.statistics[index]]
            values += zip(self.model.non_trainable_variables, own, strict=True)
        return values
