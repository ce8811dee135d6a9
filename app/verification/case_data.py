"""Defines the parts of a case's training that are verified, and their batches.

Faults tend to appear in the first steps, a short last batch, the second epoch and after a resume.
Each of these is a separate part, so that the steps between them need not be trained.
"""

import collections
import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from app.runtime.errors import DataError
from app.verification.case_file import CaseFile, is_none
from lockstep.arithmetic import rows_of
from lockstep.record_keras import leaves, plain_copy
from lockstep.trace import Trace

Batch = list[np.ndarray]  # Leaves of inputs, targets and sample weights.
RESUME = "resume"

_CHUNK_BYTES = 2**28  # Limit of the states and gradients recorded at a time.
_SECOND_EPOCH = "the first step of the second epoch"
_RESUMED = "the step after a save and resume"
# A shuffled dataset differs from pass to pass, and `fit` may iterate over it before training.
_NUM_PASSES = 3


@dataclasses.dataclass(frozen=True)
class Part:
    """A part of a training.

    Attributes:
        place: "first", "last_batch", "second_epoch" or `RESUME`.
        dataset: the argument of `fit`; None for the data that the case distributes.
        epochs: number of epochs to train.
        wanted: numbers of the steps to check, from 0.
        passes: batches of these steps in successive passes over the dataset.
        names: names of these steps.
    """

    place: str
    dataset: tf.data.Dataset | None
    epochs: int
    wanted: Sequence[int]
    passes: list[list[Batch]]
    names: list[str]

    def batches_of(self, trace: Trace) -> list[Batch]:
        """Returns the batches of the pass that matches most of the replicas' batches."""
        given = [_rows_of_all(trace, position) for position in range(len(trace.steps))]

        def num_same(batches: list[Batch]) -> int:
            return sum(rows_of(b) == g for b, g in zip(batches, given, strict=False))

        return max(self.passes, key=num_same)


class CaseData:
    """Creates the dataset of a case as often as needed.

    Args:
        case: the case, which defines the dataset.
        global_batch_size: size of its batches.
        num_steps: number of first steps to check, if the dataset has that many.

    Attributes:
        first_size: number of examples in the first batch.
        num_batches: number of batches of an epoch; None if the dataset is infinite.

    Raises:
        DataError: the dataset is empty, or two calls of `data` return different batches.
    """

    def __init__(self, case: CaseFile, global_batch_size: int, num_steps: int):
        self._case, self._size = case, global_batch_size
        first, again = self._draw(0, num_steps), self._draw(0, num_steps)
        if not first:
            raise DataError("data() has no batch; return a data set with at least one batch")
        _check_batches(first, again)
        self._first, self.first_size = first, len(first[0][0])
        self.num_batches = self._count()
        self._last: list[Batch] = []  # The last batch, unless the first steps include it.
        if self.num_batches and self.num_batches > len(first):
            self._last = self._draw(self.num_batches - 1, 1)

    def dataset(self) -> tf.data.Dataset:
        """Returns a newly created dataset."""
        return self._case.create_data(self._size)

    def parts(self, bytes_of_a_step: int) -> list[Part]:
        """Returns the parts in the order of a training.

        Args:
            bytes_of_a_step: size of one recorded step; limits the number of steps of a part.
        """
        chunk, parts = max(1, _CHUNK_BYTES // bytes_of_a_step), []
        (place, start, names, epoch), *others = self._places()
        for i in range(0, len(names), chunk):
            parts.append(self._part(place, start + i, names[i : i + chunk], epoch))
        parts += [self._part(*other) for other in others]
        return [*parts, self._part(RESUME, 0, [_RESUMED], 1)]

    def whole_training(self) -> list[Part]:
        """Returns one part of two epochs, for a case that distributes its data."""
        numbers: list[int] = []
        all_names: list[str] = []
        passes: list[list[Batch]] = [[] for _ in range(_NUM_PASSES)]
        epochs = 1
        for _, start, names, epochs in self._places():
            first = (epochs - 1) * (self.num_batches or 0) + start
            numbers += range(first, first + len(names))
            all_names += names
            for batches, more in zip(passes, self._passes(start, len(names), epochs), strict=True):
                batches += more
        return [Part("first", None, epochs, numbers, passes, all_names)]

    def _places(self) -> list[tuple[str, int, list[str], int]]:
        """Returns place, number of the first batch, names of the steps and epoch of each part."""
        places = [("first", 0, [f"step {i + 1}" for i in range(len(self._first))], 1)]
        if self.num_batches is not None:
            if self._last:
                name = f"the last batch of an epoch ({len(self._last[0][0])} examples)"
                places.append(("last_batch", self.num_batches - 1, [name], 1))
            places.append(("second_epoch", 0, [_SECOND_EPOCH], 2))
        return places

    def _part(self, place: str, start: int, names: list[str], epoch: int) -> Part:
        size, before = len(names), 0
        if place == "last_batch":  # `fit` fails if the first batch does not divide evenly.
            before = 1
        dataset = self.dataset().skip(start - before).take(size + before)
        first = epoch - 1 + before
        passes = self._passes(start, size, epoch)
        return Part(place, dataset, epoch, range(first, first + size), passes, names)

    def _passes(self, start: int, size: int, epoch: int) -> list[list[Batch]]:
        """Returns the batches of successive passes over the dataset, from an epoch on."""
        dataset = self.dataset().skip(start).take(size)
        return [self._read(dataset) for _ in range(epoch - 1 + _NUM_PASSES)][epoch - 1 :]

    def _draw(self, start: int, size: int) -> list[Batch]:
        return self._read(self.dataset().skip(start).take(size))

    def _read(self, dataset: tf.data.Dataset) -> list[Batch]:
        def read() -> list[Batch]:
            return [[plain_copy(leaf) for leaf in leaves(batch)] for batch in dataset]

        return self._case.run(read, "while the data set was read")

    def _count(self) -> int | None:
        dataset = self.dataset()
        number = int(dataset.cardinality())
        if number == tf.data.INFINITE_CARDINALITY:
            return None
        if number >= 0:
            return number
        return self._case.run(lambda: sum(1 for _ in dataset), "while the data set was read")

    def to_evaluate(self) -> tf.data.Dataset:
        """Returns the first batches and the last batch, in a fixed order."""
        batches = [*self._first, *self._last]
        joined = [tf.constant(np.concatenate(parts)) for parts in zip(*batches, strict=True)]
        dataset = tf.data.Dataset.from_tensor_slices(tuple(joined)).batch(self.first_size)
        spec = self.dataset().element_spec

        def nest(*leaves: tf.Tensor) -> Any:
            values = iter(leaves)
            flat = [None if is_none(leaf) else next(values) for leaf in tf.nest.flatten(spec)]
            return tf.nest.pack_sequence_as(spec, flat)

        return dataset.map(nest)


def _check_batches(first: list[Batch], again: list[Batch]) -> None:
    """Checks that all parts of a batch have equally many examples, the same in each call.

    Raises:
        DataError: they do not.
    """
    for number, (batch, other) in enumerate(zip(first, again, strict=False), start=1):
        shapes = [leaf.shape for leaf in batch]
        if not all(shapes) or len({shape[0] for shape in shapes}) > 1:
            raise DataError(
                f"data(): batch {number} has parts of shapes {', '.join(map(str, shapes))}, which"
                " do not begin with one number of examples; call batch(global_batch_size)"
            )
        if any(x.tobytes() != y.tobytes() for x, y in zip(batch, other, strict=True)):
            raise DataError(
                f"data(): batch {number} differs when data() is called again; make the data set"
                " deterministic: give shuffle() and random operations a seed"
            )


def _rows_of_all(trace: Trace, position: int) -> collections.Counter:
    """Counts the examples of all replicas in a step; their order does not matter."""
    shards = (trace.arrays(position, "data", shard) or [] for shard in trace.shards)
    return sum(map(rows_of, shards), collections.Counter())
