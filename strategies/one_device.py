"""Calls a user's model on a replica as if it were the only replica."""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import TypeVar

import keras
import tensorflow as tf

from strategies.keras_private import is_seed, stored_value
from strategies.replica import Replica
from strategies.tf_private import local_replica_id

T = TypeVar("T")
# 2³² divided by the golden ratio, whose multiples mod 2³² are far apart.
_SEED_STRIDE = 0x9E3779B9


class OneDevice:
    """Calls functions of a replica's model in the context of a one-device strategy.

    Keras divides losses by the number of replicas in sync, and a model may read that number; here
    the strategies scale instead. Every replica stores the same seeds, but draws from seeds that
    depend on (seed, step, replica), so that the saved seeds equal those of one device.

    Create it outside of any strategy's scope.
    """

    def __init__(self) -> None:
        self._strategy = tf.distribute.get_strategy()
        self._contexts: dict[int, tf.distribute.ReplicaContext] = {}

    def __call__(
        self,
        replica: Replica,
        function: Callable[[], T],
        values: Mapping[str, tf.Tensor] | None = None,
        *,
        assigns: bool = True,
    ) -> T:
        """Calls a function.

        Args:
            replica: the replica whose model the function uses.
            function: called once.
            values: path of a variable → tensor that replaces its value.
            assigns: whether non-trainable variables keep the values that are assigned to them.
        """
        given, variables = values or {}, replica.model.non_trainable_variables
        seeds = {id(v) for v in variables if is_seed(replica.model, v)}
        stored, own = [], []
        for v in variables:
            value = given[v.path] if v.path in given else tf.convert_to_tensor(v.value)
            stored.append(value)
            own.append(seed_of_replica(value, replica.replica_id) if id(v) in seeds else value)
        mapping = list(zip(variables, own, strict=True))
        with self.seen(), ModelScope(mapping, collect_losses=True) as scope:
            before = [scope.get_current_value(v) for v in variables]
            result = function()
        self._check_weights(replica.model, scope)
        for v, old, first in zip(variables, stored, before, strict=True):
            new = scope.get_current_value(v)
            if assigns and new is not first:
                v.value.assign(old + (new - first) if id(v) in seeds else new)
        return result

    def _check_weights(self, model: keras.Model, scope: "ModelScope") -> None:
        """Checks that a call has not assigned to a weight, which only the update may change.

        Raises:
            ValueError: a weight was assigned to.
        """
        for weight in model.trainable_variables:
            if scope.was_assigned(weight):
                raise ValueError(
                    f"model {model.name} assigns to its weight {weight.path} when it is called, so"
                    " that each replica would have another one; use keras_fit"
                )

    @contextlib.contextmanager
    def seen(self) -> Iterator[None]:
        """Enters a context in which `tf.distribute` reports one replica.

        Variables still resolve to those of the current replica.
        """
        number = local_replica_id()
        if number not in self._contexts:  # Forward and backward pass need the same context.
            self._contexts[number] = tf.distribute.ReplicaContext(self._strategy, number)
        with self._contexts[number]:
            yield


class ModelScope(keras.StatelessScope):
    """A `StatelessScope` in which a variable without a replacing value keeps its own."""

    def get_current_value(self, variable: keras.Variable) -> tf.Tensor | tf.Variable:
        """Returns the value of a variable; regularizers use it without a fallback for None."""
        value = super().get_current_value(variable)
        return stored_value(variable) if value is None else value

    def was_assigned(self, variable: keras.Variable) -> bool:
        """Returns whether a variable without a given value has been assigned one."""
        return super().get_current_value(variable) is not None


def seed_of_replica(state: tf.Tensor, replica_id: int | tf.Tensor) -> tf.Tensor:
    """Returns a replica's seed state: seed + replica_id · stride mod 2³², and the draw count.

    Args:
        state: state of a `keras.random.SeedGenerator`, int64 `(2,)`: seed and draw count.
        replica_id: replica 0 gets `state` itself.
    """
    offset = tf.cast(replica_id, tf.int64) * tf.constant([_SEED_STRIDE, 0], tf.int64)
    return tf.cast((tf.cast(state, tf.int64) + offset) % 2**32, state.dtype)
