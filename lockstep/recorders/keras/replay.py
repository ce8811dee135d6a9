"""Starts each step from the state of another recording."""

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import keras
import numpy as np
import tensorflow as tf

from lockstep.data.trace import SEED, STATE, STATISTIC, WEIGHT
from lockstep.recorders.common import Request
from lockstep.recorders.keras.values import replica_id
from lockstep.recorders.states import Own, States


class Replay:
    """Assigns the states of another recording before the steps.

    Args:
        request: the steps to record, and the other recording.
        fail: raises an error, whose text it gets.

    Attributes:
        states: those of the other recording.

    Raises:
        ValueError: the other recording cannot be read, or lacks steps.
    """

    def __init__(self, request: Request, fail: Callable[[str], NoReturn]) -> None:
        assert request.replay
        self.states = States("keras", request.replay, request.wanted, request.names)
        self._first, self._fail = min(request.wanted), fail

    def assign(
        self, state: Sequence[keras.Variable], variables: Sequence[dict[str, str]],
        number: tf.Tensor, first: int = 0,
    ) -> None:  # fmt: skip
        """Assigns the state before a step to this replica's copies, if the step is recorded.

        Leaves out the variables before the index `first`.
        """
        copies_of, replica = tf.distribute.get_strategy().experimental_local_results, replica_id()
        own = [
            # The learning rate is that of the script.
            Own(about | ({"kind": ""} if about.get("slot") == "learning_rate" else {}), shape)
            for about, shape in zip(variables, [tuple(v.shape) for v in state], strict=True)
        ]
        kinds = [WEIGHT, STATISTIC]
        if self.states.framework == "keras":
            strategy, about = tf.distribute.get_strategy(), self.states.trace.about
            # Other numbers of replicas draw other numbers.
            is_alike = strategy.num_replicas_in_sync == about.num_replicas
            kinds += [STATE, SEED] if is_alike else [STATE]
        try:
            found = self.states.sources(own, kinds)
            self.states.require_all(own, found, kinds)
        except ValueError as error:
            self._fail(str(error))
        found = {index: source for index, source in found.items() if index >= first}
        if not found:
            return
        copies = [copies_of(state[index].value) for index in found]

        def read(number: np.int64) -> list[Any]:
            before = self.states.before(int(number), replica)
            return [source.of(before) for source in found.values()]

        def assign() -> tf.Tensor:
            dtypes = [array.dtype for array in read(np.int64(self._first))]
            arrays = tf.numpy_function(read, [number], dtypes)
            for copy, array in zip(copies, arrays, strict=True):
                local = copy[replica % len(copy)]
                local.assign(tf.cast(tf.reshape(array, local.shape), local.dtype))
            return number

        is_sampled = bool(self.states.trace.about.sample)  # Its first state alone is whole.
        is_given = number == self._first if is_sampled else number >= 0
        tf.cond(is_given, assign, lambda: number)
