"""Defines the parts of a case's training that are verified, and their batches.

Faults tend to appear in the first steps, a short last batch, the second epoch and after a resume.
Each of these is a separate part, so that the steps between them need not be trained.
"""

import collections
import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from app.runtime.errors import DataError
from app.training.case_file import CaseFile, is_none
from lockstep.arithmetic import rows_of
from lockstep.record_keras import leaves, plain_copy
from lockstep.trace import Trace

Batch = list[np.ndarray]  # Leaves of inputs, targets and sample weights.

_CHUNK_BYTES = 2**28  # Limit of the states and gradients recorded at a time.
_SECOND_EPOCH = "the first step of the second epoch"
_RESUMED = "the step after a save and resume"
# A shuffled dataset differs from pass to pass, and `fit` may iterate over it before training.
_NUM_PASSES = 3


@dataclasses.dataclass(frozen=True)
class Part:
    """A part of a training.

    Attributes:
        place: "first", "last_batch", "second_epoch" or "resume".
        dataset: the argument of `fit`; None for the data that the case distributes.
        epochs: number of epochs to train.
        wanted: numbers of the steps to check, from 0.
        passes: batches of these steps in successive passes over the dataset.
        names: names of these steps.
        resumes: whether the model is saved and restored before this part.
    """

    place: str
    dataset: tf.data.Dataset | None
    epochs: int
    wanted: Sequence[int]
    passes: list[list[Batch]]
    names: list[str]
    resumes: bool = False

    def batches_of(self, trace: Trace) -> list[Batch]:
        """Returns the batches of the pass that matches most of the replicas' batches."""
        given = [_rows_of_all(trace, position) for position in range(len(trace.steps))]

        def num_same(batches: list[Batch]) -> int:
            return sum(rows_of(b) == g for b, g in zip(batches, given, strict=False))

        return max(self.passes, key=num_same)


class _Slice(NamedTuple):
    """Consecutive batches of a dataset."""

    start: int
    size: int

    def of(self, dataset: tf.data.Dataset) -> tf.data.Dataset:
        """Returns these batches."""
        return dataset.skip(self.start).take(self.size)


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
        first, again = (self._draw(self.dataset().take(num_steps)) for _ in range(2))
        if not first:
            raise DataError("data() has no batch; return a data set with at least one batch")
        for number, batch in enumerate(first, start=1):
            _check_shapes([leaf.shape for leaf in batch], f"data(): batch {number}")
        _check_same(first, again)
        self._first, self._num_first, self.first_size = first, len(first), len(first[0][0])
        self.num_batches = self._count()

    def dataset(self) -> tf.data.Dataset:
        """Returns a newly created dataset."""
        return self._case.create_data(self._size)

    def parts(self, bytes_of_a_step: int) -> list[Part]:
        """Returns the parts in the order of a training.

        Args:
            bytes_of_a_step: size of one recorded step; limits the number of steps of a part.
        """
        parts = []
        chunk = max(1, _CHUNK_BYTES // bytes_of_a_step)
        for start in range(0, self._num_first, chunk):
            size = min(chunk, self._num_first - start)
            names = [f"step {start + i + 1}" for i in range(size)]
            parts.append(self._piece("first", _Slice(start, size), names))
        if (last := self._last()) is not None:
            # After a full batch: `fit` fails if the first batch does not divide evenly.
            piece = self._piece("last_batch", _Slice(last, 1), [""])
            dataset = _Slice(last - 1, 2).of(self.dataset())
            parts.append(dataclasses.replace(piece, dataset=dataset, wanted=[1]))
        if self.num_batches is not None:
            piece = self._piece("second_epoch", _Slice(0, 1), [_SECOND_EPOCH], first_pass=2)
            parts.append(dataclasses.replace(piece, epochs=2, wanted=[1]))
        piece = self._piece("resume", _Slice(0, 1), [_RESUMED])
        parts.append(dataclasses.replace(piece, resumes=True))
        return [_with_sizes(part) for part in parts]

    def whole_training(self) -> list[Part]:
        """Returns one part of two epochs, for a case that distributes its data."""
        numbers: list[int] = []
        names: list[str] = []
        passes: list[list[Batch]] = [[] for _ in range(_NUM_PASSES)]

        def look_at(slice_: _Slice, new_names: list[str], *, epoch: int = 1) -> None:
            start = (epoch - 1) * (self.num_batches or 0) + slice_.start
            numbers.extend(range(start, start + slice_.size))
            names.extend(new_names)
            drawn = self._draw_passes(slice_, epoch - 1 + _NUM_PASSES)[epoch - 1 :]
            for batches, more in zip(passes, drawn, strict=True):
                batches.extend(more)

        look_at(_Slice(0, self._num_first), [f"step {i + 1}" for i in range(self._num_first)])
        if (last := self._last()) is not None:
            (batch,) = self._draw(_Slice(last, 1).of(self.dataset()))
            look_at(_Slice(last, 1), [_name_last(batch)])
        if self.num_batches is not None:
            look_at(_Slice(0, 1), [_SECOND_EPOCH], epoch=2)
        epochs = 2 if names[-1] == _SECOND_EPOCH else 1
        return [Part("first", None, epochs, numbers, passes, names)]

    def _piece(
        self,
        place: str,
        slice_: _Slice,
        names: list[str],
        *,
        first_pass: int = 1,
    ) -> Part:
        """Returns a part with the batches of some passes; equal passes are listed once."""
        passes: list[list[Batch]] = []
        for batches in self._draw_passes(slice_, first_pass - 1 + _NUM_PASSES)[first_pass - 1 :]:
            if not any(_is_same(batches, other) for other in passes):
                passes.append(batches)
        numbers = range(len(names))
        return Part(place, slice_.of(self.dataset()), 1, numbers, passes, names)

    def _draw_passes(self, slice_: _Slice, number: int) -> list[list[Batch]]:
        """Returns the batches of successive passes over the dataset."""
        dataset = slice_.of(self.dataset())
        return [self._draw(dataset) for _ in range(number)]

    def _last(self) -> int | None:
        """Returns the number of the last batch, from 0; None if the first steps include it."""
        if self.num_batches is None:
            return None
        return self.num_batches - 1 if self.num_batches > self._num_first else None

    def _draw(self, dataset: tf.data.Dataset) -> list[Batch]:
        def draw() -> list[Batch]:
            return [[plain_copy(leaf) for leaf in leaves(batch)] for batch in dataset]

        return self._case.run(draw, "while the data set was read")

    def _count(self) -> int | None:
        dataset = self.dataset()
        number = int(dataset.cardinality())
        if number == tf.data.INFINITE_CARDINALITY:
            return None
        if number >= 0:
            return number
        count = itertools.count()
        self._case.run(lambda: [next(count) for _ in dataset], "while the data set was read")
        return next(count)

    def to_evaluate(self) -> tf.data.Dataset:
        """Returns the first batches and the last batch, in a fixed order."""
        batches = list(self._first)
        if (last := self._last()) is not None:
            batches += self._draw(_Slice(last, 1).of(self.dataset()))
        joined = [tf.constant(np.concatenate(parts)) for parts in zip(*batches, strict=True)]
        dataset = tf.data.Dataset.from_tensor_slices(tuple(joined)).batch(self.first_size)
        spec = self.dataset().element_spec

        def nest(*leaves: tf.Tensor) -> Any:
            values = iter(leaves)
            flat = [None if is_none(leaf) else next(values) for leaf in tf.nest.flatten(spec)]
            return tf.nest.pack_sequence_as(spec, flat)

        return dataset.map(nest)


def _check_shapes(shapes: Sequence[tuple[int, ...]], where: str) -> None:
    """Checks that all parts of a batch have equally many examples.

    Raises:
        DataError: they do not.
    """
    if not all(shapes) or len({shape[0] for shape in shapes}) > 1:
        raise DataError(
            f"{where} has parts of shapes {', '.join(map(str, shapes))}, which do not begin with"
            " one number of examples; call batch(global_batch_size)"
        )


def _with_sizes(part: Part) -> Part:
    """Adds the size of the last batch to its name."""
    if part.place != "last_batch":
        return part
    return dataclasses.replace(part, names=[_name_last(part.passes[0][0])])


def _name_last(batch: Batch) -> str:
    return f"the last batch of an epoch ({len(batch[0])} examples)"


def _check_same(first: list[Batch], second: list[Batch]) -> None:
    """Checks that two calls of `data` return the same batches.

    Raises:
        DataError: the batches differ.
    """
    for number, (a, b) in enumerate(zip(first, second, strict=False), start=1):
        if not _is_same([a], [b]):
            raise DataError(
                f"data(): batch {number} differs when data() is called again; make the data set"
                " deterministic: give shuffle() and random operations a seed"
            )


def _is_same(first: list[Batch], second: list[Batch]) -> bool:
    return len(first) == len(second) and all(
        x.tobytes() == y.tobytes()
        for a, b in zip(first, second, strict=True)
        for x, y in zip(a, b, strict=True)
    )


def _rows_of_all(trace: Trace, position: int) -> collections.Counter:
    """Counts the examples of all replicas in a step; their order does not matter."""
    shards = (trace.arrays(position, "data", shard) or [] for shard in trace.shards)
    return sum(map(rows_of, shards), collections.Counter())
