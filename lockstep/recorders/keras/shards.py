"""Calls the model, on one device, for each replica's part of the batch in another recording."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import keras
import numpy as np
import tensorflow as tf
from keras import tree

from lockstep.data.trace import SEED
from lockstep.recorders.common import Hooks, require
from lockstep.recorders.keras.copies import Copies
from lockstep.recorders.keras.private import layers_of
from lockstep.recorders.keras.values import is_seed
from lockstep.recorders.parts import places_of, rows_of
from lockstep.recorders.states import States


class _Context:
    """A replica's context that has another number, and other replicas beside it."""

    def __init__(self, context: Any, replica: int, num: int) -> None:
        self._context = context
        self.replica_id_in_sync_group = tf.constant(replica)
        self.num_replicas_in_sync = num

    def __getattr__(self, name: str) -> Any:
        return getattr(self._context, name)


class ShardRunner:
    """Calls the model once for each part of the batch, in place of one call.

    Each part is computed with the seeds of its replica and in a context that has its number. That
    of replica 0 comes last: the model keeps its statistics, and the seeds after it. The others are
    also computed with the number 0, which shows whether layers draw by the number of the replica.

    Args:
        model: the model.
        states: the states of the replicas in the other recording.
        copies: what was copied of the step.

    Attributes:
        draws_apart: whether the number of a replica has made a difference in each recorded step.

    Raises:
        ValueError: the model cannot be called for parts of a batch.
    """

    def __init__(self, model: keras.Model, states: States, copies: Copies) -> None:
        self._model, self._states, self._copies = model, states, copies
        self._num, self._apart = states.trace.about.num_replicas, dict[int, bool]()
        self._found: tuple[Any, Any] = (None, None)  # Of a step: its number, the replicas of rows.
        self._number, self._left = -1, dict[int, list[np.ndarray]]()  # Of a step: replica → state.
        synchronized = [x.name for x in layers_of(model) if getattr(x, "synchronized", False)]
        require(
            not synchronized,
            f"shards='each': {', '.join(synchronized[:1])} is synchronised; record without shards=",
        )
        is_one = model.distribute_strategy.num_replicas_in_sync == 1
        is_called = type(model).call is not keras.Model.call
        require(
            is_one and is_called,
            "shards='each': needs one model, called as a whole on one device; record without"
            " shards=",
        )

    @property
    def draws_apart(self) -> bool:
        """Whether the number of a replica has made a difference in each recorded step."""
        return bool(self._apart) and all(self._apart.values())

    def install(self, hooks: Hooks) -> None:
        """Replaces the model's method `call`."""
        hooks.hook(self._model, "call", self._call)

    @tf.autograph.experimental.do_not_convert
    def _call(self, inner: Callable, *args: Any, **options: Any) -> Any:
        rows = [x for x in tree.flatten((args, options)) if tf.is_tensor(x) and x.shape.rank]
        step = self._copies.step
        if not (step and rows and options.get("training")):
            return inner(*args, **options)
        number = step.number
        found = tf.numpy_function(self._places, [number, rows[0]], [tf.int64] * (self._num + 1))
        *places, numbers = [tf.ensure_shape(each, [None]) for each in found]
        state, outputs = [*self._state.values()], dict[int, Any]()
        num_losses = len(self._model.losses)
        apart = has_parts = tf.constant(False)
        for replica in reversed(range(self._num)):
            given = tree.map_structure(
                lambda x, own=places[replica]: _rows_of(x, own, rows[0]), (args, options)
            )
            saved = [tf.identity(variable.value) for variable in state]
            own: list[Any] = []
            for as_replica in (0, replica) if replica else (0,):
                _assign(state, self._state_of(number, replica, saved))
                with self._numbered(as_replica):
                    own.append(inner(*given[0], **given[1]))
            outputs[replica] = own[-1]
            self._keep_state(number, replica)
            if replica:
                _assign(state, saved)
                has_parts = tf.logical_or(has_parts, tf.size(places[replica]) > 0)
                apart = tf.logical_or(apart, _differ(*own))
        if len(self._model.losses) > num_losses:
            self._copies.fail(
                "shards='each': layers add losses of what they compute, and it is not known how"
                " those of parts make the batch's; compute them in the step, or record without"
                " shards="
            )
        self._note(number, apart, has_parts)
        if self._found[0] is number:  # A step with several calls; one may have other examples.
            numbers = tf.where(tf.reduce_all(self._found[1] >= 0), numbers, -tf.ones_like(numbers))
        self._found = number, numbers
        self._copies.keep("shards", [numbers])
        order = tf.argsort(tf.concat(places[::-1], 0))
        joined = [outputs[replica] for replica in reversed(range(self._num))]
        return tree.map_structure(lambda *parts: _joined(parts, order), *joined)

    @contextlib.contextmanager
    def _numbered(self, replica: int) -> Iterator[None]:
        """Gives layers that ask for it the context of a replica of the other training."""
        context = _Context(tf.distribute.get_replica_context(), replica, self._num)
        with mock.patch.object(tf.distribute, "get_replica_context", lambda: context):
            yield

    def _places(self, number: np.int64, batch: np.ndarray) -> list[np.ndarray]:
        """Returns the places of each replica's examples in a batch, and the replica of each.

        Where the batch has other examples, it is split evenly, and no replica is said to have them.
        """
        batch, parts = batch.astype(np.bytes_) if batch.dtype == object else batch, []
        for replica in range(self._num) if number >= 0 else ():
            position = self._states.position(int(number))
            (own, *_) = self._states.trace.arrays(position, "data", replica) or [batch[:0]]
            parts.append(rows_of(np.atleast_1d(own).astype(batch.dtype)))
        found = [np.array(each, np.int64) for each in places_of(batch, parts, partly=True)]
        if not found:
            split = np.array_split(np.arange(len(batch)), self._num)
            return [*split, np.full(len(batch), -1)]
        numbers = np.empty(len(batch), np.int64)
        for replica, places in enumerate(found):
            numbers[places] = replica
        return [*found, numbers]

    @property
    def _state(self) -> dict[int, keras.Variable]:
        """What layers keep beside weights that are trained, by the index in the description."""
        return {i: v for i, v in enumerate(self._model.variables) if not v.trainable}

    def _state_of(self, number: tf.Tensor, replica: int, state: Sequence[Any]) -> Sequence[Any]:
        """Returns what a replica has in place of the model's state that is not trained.

        It is what its last call in this step has left, else the model's with its seeds.
        """
        seeds = [place for place, v in enumerate(self._state.values()) if is_seed(v)]
        keys = [key for key, v in self._states.trace.variables.items() if v.kind == SEED]
        if len(keys) != len(seeds):
            self._copies.fail(
                f"shards='each': the model has {len(seeds)} generators of random numbers, and"
                f" {self._states.name} {len(keys)}"
            )

        def read(number: np.int64, *own: np.ndarray) -> list[np.ndarray]:
            if number < 0:
                return [*own]
            if number != self._number:
                self._number, self._left = int(number), {}
            if replica in self._left:
                return self._left[replica] if replica else [*own]
            found, before = [*own], self._states.before(int(number), replica)
            for index, key in zip(seeds, keys, strict=True):
                array = np.asarray(before.get(key, own[index]), own[index].dtype)
                found[index] = array.reshape(own[index].shape)
            return found

        return tf.numpy_function(read, [number, *state], [x.dtype for x in state]) if state else []

    def _keep_state(self, number: tf.Tensor, replica: int) -> None:
        """Keeps the state that the call of a replica leaves."""

        def note(number: np.int64, *own: np.ndarray) -> np.int64:
            if number >= 0:
                self._left[replica] = [np.array(array) for array in own] if replica else []
            return number

        if state := self._state:
            values = [tf.identity(variable.value) for variable in state.values()]
            tf.numpy_function(note, [number, *values], tf.int64)
            self._copies.keep("own_after", [*state.values()], [*state], replica)

    def _note(self, number: tf.Tensor, apart: tf.Tensor, has_parts: tf.Tensor) -> None:
        """Notes whether any call of a step, for more than one replica, draws apart."""

        def note(number: np.int64, apart: np.bool_, has_parts: np.bool_) -> np.int64:
            if number >= 0 and has_parts:
                self._apart[int(number)] = bool(apart) or self._apart.get(int(number), False)
            return number

        tf.numpy_function(note, [number, apart, has_parts], tf.int64)


def _assign(variables: Sequence[Any], values: Sequence[Any]) -> None:
    for variable, value in zip(variables, values, strict=True):
        variable.assign(tf.ensure_shape(value, variable.shape))


def _rows_of(value: Any, places: tf.Tensor, batch: tf.Tensor) -> Any:
    """Returns these rows of a tensor that has one for each example; other arguments as they are."""
    has_rows = tf.is_tensor(value) and value.shape.rank and value.shape[0] == batch.shape[0]
    return tf.gather(value, places) if has_rows else value


def _differ(first: Any, second: Any) -> tf.Tensor:
    """Returns whether two nests of outputs differ in any element that is a number."""
    pairs = zip(tree.flatten(first), tree.flatten(second), strict=True)
    return tf.reduce_any([
        tf.reduce_any((a != b) & ((a == a) | (b == b))) for a, b in pairs
    ])  # fmt: skip


def _joined(parts: Sequence[Any], order: tf.Tensor) -> tf.Tensor:
    """Returns the outputs of all parts of a batch as one, in the order of its examples."""
    have_rows = all(tf.is_tensor(part) and part.shape.rank for part in parts)
    text = "the model has an output without a row for each example; record without shards="
    require(have_rows, f"shards='each': {text}")
    return tf.gather(tf.concat(parts, 0), order)
