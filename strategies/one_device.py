"""Code of a user's model, which is called on a replica as if it was the only one."""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import TypeVar

import keras
import tensorflow as tf

from strategies.keras_private import is_seed, stored_value
from strategies.replica import Replica
from strategies.tf_private import local_replica_id

T = TypeVar("T")
# 2³² over the golden ratio: multiples of it, mod 2³², are far apart.
_SEED_STRIDE = 0x9E3779B9


class OneDevice:
    """Calls functions that use the model of a replica, which see a strategy of one device.

    Keras divides losses by the number of replicas that it sees, and a model may ask for it; our
    strategies scale by themselves. Every replica stores the same seeds and draws from other ones,
    which depend on (seed, step, replica): so the seeds that are saved are those of one device.

    To be created outside of any strategy's scope.
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
            replica: whose model it uses.
            function: called once.
            values: path of a variable → tensor to take in its place.
            assigns: whether variables that are not trained keep what is assigned to them.
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
        """Checks that a call has assigned to no weight: the update alone may.

        Raises:
            ValueError: it has.
        """
        for weight in model.trainable_variables:
            if scope.was_assigned(weight):
                raise ValueError(
                    f"model {model.name} assigns to its weight {weight.path} when it is called, so"
                    " that each replica would have another one; use keras_fit"
                )

    @contextlib.contextmanager
    def seen(self) -> Iterator[None]:
        """Lets `tf.distribute` show one replica; variables are still those of this one."""
        number = local_replica_id()
        if number not in self._contexts:  # The backward pass has to see that of the forward pass.
            self._contexts[number] = tf.distribute.ReplicaContext(self._strategy, number)
        with self._contexts[number]:
            yield


class ModelScope(keras.StatelessScope):
    """A scope in which variables that it was given no value for have their own."""

    def get_current_value(self, variable: keras.Variable) -> tf.Tensor | tf.Variable:
        """Returns the value of a variable; regularizers ask for it without looking further."""
        value = super().get_current_value(variable)
        return stored_value(variable) if value is None else value

    def was_assigned(self, variable: keras.Variable) -> bool:
        """Tells whether a variable without a given value has one now."""
        return super().get_current_value(variable) is not None


def seed_of_replica(state: tf.Tensor, replica_id: int | tf.Tensor) -> tf.Tensor:
    """Returns the state that a replica draws from: seed + replica_id · stride mod 2³², and count.

    Args:
        state: of a `keras.random.SeedGenerator`, int64 `(2,)`: the seed and how often it was drawn
            from.
        replica_id: that of replica 0 is the state itself.
    """
    offset = tf.cast(replica_id, tf.int64) * tf.constant([_SEED_STRIDE, 0], tf.int64)
    return tf.cast((tf.cast(state, tf.int64) + offset) % 2**32, state.dtype)
