"""Copies of tensors in the steps that are recorded, by replica."""

import collections
import dataclasses
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NoReturn

import numpy as np
import tensorflow as tf

from lockstep.data.archive import Member
from lockstep.data.trace import OF_VARIABLES
from lockstep.numeric.arrays import Rows
from lockstep.recorders.common import Request
from lockstep.recorders.keras.private import is_in_xla
from lockstep.recorders.keras.values import plain_copy, replica_id, tensors_of
from lockstep.recorders.output import Output
from lockstep.recorders.parts import members_of, variable_of

# What a compiled function may compute: a recording without it can be compared.
OF_FORWARD_PASS = ("y_pred", "loss", "objective")
NOT_WRAPPED = "a step is not recorded; call strategy.run(recorder.wrap(step), …)"


@dataclasses.dataclass
class Step:
    """What is known of the step that a replica runs.

    Attributes:
        number: its number, a tensor; -1 if it is not recorded.
        num_variables: the number of variables of the model before it.
        num_kept, num_rates: how many variables before it, and learning rates, are copied.
        num_losses: how many losses it has differentiated.
        is_scaled: whether an optimizer scales the loss.
        places: the indices of the last gradients.
        applied: index of a gradient → the gradient that was applied first.
    """

    number: tf.Tensor
    num_variables: int
    num_kept: int = 0
    num_rates: int = 0
    num_losses: int = 0
    is_scaled: bool = False
    places: Sequence[int] = ()
    applied: dict[int, Any] = dataclasses.field(default_factory=dict)


class Copies:
    """Copies tensors and variables of replicas while they run traced steps.

    Args:
        request: the steps to record, and how large arrays are sampled.
        about: the description, as far as it is known.
        output: the file to which arrays are written as they come.

    Attributes:
        output: the file.
        error: the first error within a step, in words.
        kept: number of a step, kind and replica → "INDEX", or "INDEX/values", … → array, or what
            the file has of it; None if that cannot be written.
        left_out: kinds, or KIND/INDEX, of which a step has several: the last one alone was copied.
        shapes: index of a variable that is sampled → its whole shape.
    """

    def __init__(self, request: Request, about: Mapping[str, Any], output: Output) -> None:
        self._request, self._about, self.output, self.error = request, about, output, ""
        self.kept: dict[tuple[int, str, int], dict[str, np.ndarray | Member | None]] = {}
        self.left_out, self.shapes = set[str](), dict[int, tuple[int, ...]]()
        self._steps = dict[int, Step]()  # By replica.
        self._num_seen: collections.Counter[int] = collections.Counter()
        self._lock = threading.Lock()  # Replicas run in threads.

    @property
    def step(self) -> Step | None:
        """The step that this replica runs; None outside of one."""
        return self._steps.get(replica_id())

    def fail(self, text: str) -> NoReturn:
        """Raises ValueError, whose text is kept without the notes of a traced function."""
        self.error = text
        raise ValueError(text)

    def begin(self, data: Sequence[tf.Tensor], num_variables: int) -> Step:
        """Begins a step of this replica with some examples."""
        replica = replica_id()

        def begin(*sizes: np.ndarray) -> np.int64:
            number = self._request.first_step + self._num_seen[replica]
            self._num_seen[replica] += 1
            if number in self._request.wanted:
                return np.int64(number)
            if self.output:
                self.output.forget()
            return np.int64(-1)

        # At the end of the data, a step begins in vain: it must not be counted.
        sizes = [tf.size(leaf) for leaf in data[:1]]
        number = tf.numpy_function(begin, sizes, tf.int64)
        self._steps[replica] = step = Step(number, num_variables)
        return step

    @property
    def num_trained(self) -> int:
        """The number of steps that have begun, also those that are not recorded."""
        return max(self._num_seen.values(), default=0)

    @tf.autograph.experimental.do_not_convert
    def end(self) -> None:
        """Ends the step of this replica."""
        del self._steps[replica_id()]

    def keep(
        self, kind: str, values: Sequence[Any], places: Sequence[int] | None = None,
        item: int | None = None,
    ) -> None:  # fmt: skip
        """Copies tensors and variables of this replica, if its step is recorded.

        Args:
            kind: their kind.
            values: the tensors and variables.
            places: their indices; from 0 if it is None.
            item: the replica of which they are; this one if it is None.
        """
        if (step := self.step) is None:
            raise ValueError(NOT_WRAPPED)
        number, replica = step.number, replica_id() if item is None else item
        if is_in_xla():
            if kind in OF_FORWARD_PASS:
                return
            self.fail(
                "jit_compile=True is around a recorded step, and XLA does not run the hooks; put it"
                " on a function that the step calls for the gradients, or leave it out to record"
            )
        pairs = [*zip(places or range(len(values)), values, strict=True)]

        def keep(number: np.int64, *arrays: np.ndarray) -> np.int64:
            left = iter(arrays)
            with self._lock:
                for place, value in pairs:
                    array: Any = next(left)
                    if isinstance(value, tf.IndexedSlices):
                        array = Rows(array, next(left), int(next(left)))
                    self._keep(int(number), kind, replica, place, array)
            return number

        def copy() -> tf.Tensor:
            flat = [part for _, value in pairs for part in tensors_of(value)]
            return tf.numpy_function(keep, [number, *flat], tf.int64)

        tf.cond(number >= 0, copy, lambda: number)

    def _keep(self, number: int, kind: str, replica: int, index: int, array: Any) -> None:
        """Writes a copy of an array, or of a sample of it; buffers are reused."""
        if kind == "start" and number != min(self._request.wanted):
            return
        layout = variable_of(self._about, kind, index).get("layout", "")
        own = members_of(self._request.sample, kind, array, layout)
        if own.shape and kind in OF_VARIABLES:
            self.shapes[index] = own.shape
        kept = self.kept.setdefault((number, kind, replica), {})
        for end, each in own.arrays.items():
            place, copied = f"{index}{end}", plain_copy(each)
            is_rate = kind == "learning_rate"
            kept[place] = (
                copied if is_rate else self.output.add(f"{kind}/{replica}/{place}", copied)
            )

    @property
    def steps(self) -> list[int]:
        """The steps that have ended; one that an error has ended is none of them."""
        return sorted({number for number, kind, _ in self.kept if kind == "after"})

    @property
    def replicas(self) -> list[int]:
        """The replicas of this process."""
        return sorted({replica for _, kind, replica in self.kept if kind == "before"})

    def rates(self, step: int) -> dict[str, float]:
        """Returns the learning rates of a step by the number of the optimizer."""
        found: dict[str, float] = {}
        for (number, kind, _), arrays in sorted(self.kept.items()):
            if (number, kind) == (step, "learning_rate"):
                rates = {x: float(np.asarray(array)) for x, array in arrays.items()}
                found = rates | found
        return found

    def arrays(self) -> Iterator[tuple[str, np.ndarray | Member | None]]:
        """Yields the name and the array for all arrays of the steps that have ended."""
        steps, left_out = self.steps, {"learning_rate", *self.left_out}
        for (number, kind, replica), arrays in sorted(self.kept.items()):
            for place, array in arrays.items() if number in steps else ():
                if left_out.isdisjoint({kind, f"{kind}/{place.split('/')[0]}"}):
                    yield f"{steps.index(number) + 1}/{kind}/{replica}/{place}", array
