"""A copy of the weights on a device, with the part of each global batch that it is trained on."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf


class Replica(NamedTuple):
    """A copy of the weights, trained on one part of each global batch.

    Attributes:
        replica_id: in 0 to R - 1, an int or an int scalar tensor.
        device: its name; "" where `tf.distribute` places it.
        model: on this device.
        optimizer: on this device.
        statistics: for each of its shards, variables in place of the model's non-trainable ones;
            empty where the model's own are those of its only shard.
        weights: tensors in place of the model's trainable variables; None for those.
    """

    replica_id: int | tf.Tensor
    device: str
    model: keras.Model
    optimizer: keras.optimizers.Optimizer
    statistics: Sequence[Sequence[keras.Variable]] = ()
    weights: Sequence[tf.Tensor] | None = None

    def values(self, index: int) -> list[tuple[keras.Variable, tf.Tensor | tf.Variable]]:
        """Returns what its `index`-th shard has in place of variables of the model."""
        values: list[tuple[keras.Variable, Any]] = []
        if self.weights:
            values += zip(self.model.trainable_variables, self.weights, strict=True)
        if self.statistics:
            own = [variable.value for variable in self.statistics[index]]
            values += zip(self.model.non_trainable_variables, own, strict=True)
        return values
