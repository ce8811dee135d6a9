"""Defines the replica: a copy of the weights on a device."""

from collections.abc import Callable, Mapping, Sequence
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
        statistics: for each of its shards, path of a non-trainable variable of the model → the
            variable that replaces it; empty if the only shard uses the model's.
        gathered_weights: tensors that replace the model's weights for one step; empty to use the
            model's.
    """

    replica_id: int | tf.Tensor
    device: str
    model: keras.Model
    optimizer: keras.optimizers.Optimizer
    statistics: Sequence[Mapping[str, keras.Variable]] = ()
    gathered_weights: Sequence[tf.Tensor] = ()

    @property
    def weights(self) -> list[tf.Tensor | tf.Variable]:
        """The trainable weights with which the model is called."""
        own = [variable.value for variable in self.model.trainable_variables]
        return list(self.gathered_weights) or own

    def weights_of(self, layer: keras.layers.Layer) -> list[tf.Tensor | tf.Variable]:
        """Returns those of `weights` that belong to a layer of the model."""
        paths = {variable.path for variable in layer.trainable_variables}
        named = zip(self.model.trainable_variables, self.weights, strict=True)
        return [weight for variable, weight in named if variable.path in paths]

    def assign(self, weights: Sequence[tf.Tensor]) -> None:
        """Assigns weights to the model, on its device."""
        with tf.device(self.device):
            for variable, weight in zip(self.model.trainable_variables, weights, strict=True):
                variable.assign(weight)

    def values(self, index: int) -> list[tuple[keras.Variable, tf.Tensor | tf.Variable]]:
        """Returns (variable of the model, its replacement) pairs for the `index`-th shard."""
        values: list[tuple[keras.Variable, Any]] = []
        if self.gathered_weights:
            values += zip(self.model.trainable_variables, self.gathered_weights, strict=True)
        if self.statistics:
            own = self.statistics[index]
            values += [(v, own[v.path].value) for v in self.model.non_trainable_variables]
        return values

    def shard_variables(self) -> list[dict[str, tf.Variable]]:
        """Returns name → variable for the statistics of each shard, with the names of a state."""
        own = {variable.path: variable for variable in self.model.non_trainable_variables}
        return [
            {f"model/{path}": variable.value for path, variable in statistics.items()}
            for statistics in self.statistics or [own]
        ]


def copies_of(
    variables: Sequence[keras.Variable], take: Callable[[tf.Tensor], tf.Tensor] = tf.identity
) -> dict[str, keras.Variable]:
    """Creates variables with the same values on the current device.

    Args:
        variables: the variables to copy.
        take: maps a value to the part of it that is copied; all of it by default.

    Returns:
        Path of the original → the new variable.
    """
    copies = {}
    for variable in variables:
        # Given a variable instead of a tensor, Keras would reuse it.
        value = take(tf.convert_to_tensor(variable.value))
        name = variable.path.replace("/", "_")
        copies[variable.path] = keras.Variable(
            value, dtype=variable.dtype, trainable=variable.trainable, name=name
        )
    return copies
