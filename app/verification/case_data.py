"""Defines the steps of a case's training that are verified, and their batches.

Faults tend to appear in the first steps, a short last batch, the second epoch and after a resume.
The steps between them are not trained.
"""

import collections
import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from app.runtime.errors import DataError
from app.verification.case_file import CaseFile, is_none
from lockstep.data.trace import Trace
from lockstep.numeric.arrays import rows_of
from lockstep.recorders.keras.values import leaves, plain_copy

Batch = list[np.ndarray]  # Leaves of inputs, targets and sample weights.

# A shuffled dataset differs from pass to pass, and `fit` may iterate over it before training.
_NUM_PASSES = 3


class Step(NamedTuple):
    """A step to verify: its epoch and the number of its batch, from 0, and its name."""

    epoch: int
    batch: int
    name: str


AFTER_RESUME = Step(0, 0, "the step after a save and resume")


@dataclasses.dataclass(frozen=True)
class Part:
    """Steps of a training that are recorded together, in one call of `fit`.

    Attributes:
        steps: the steps, in order.
        dataset: the argument of `fit`; None for the data that the case distributes.
        wanted: numbers of these steps in the training, from 0.
        passes: in successive passes over the dataset, number of a batch → the batch.
    """

    steps: Sequence[Step]
    dataset: tf.data.Dataset | None
    wanted: Sequence[int]
    passes: list[dict[int, Batch]]

    @property
    def num_epochs(self) -> int:
        """The number of epochs to train."""
        return self.steps[-1].epoch + 1

    def batches_of(self, trace: Trace) -> list[Batch]:
        """Returns the batches of the passes that match most of the replicas' batches.

        Each epoch has a later pass than the one before.
        """
        given = [_rows_of_all(trace, position) for position in range(len(trace.steps))]
        found: list[Batch] = []
        first = 0
        for epoch in range(self.num_epochs):
            pairs = zip(self.steps, given, strict=False)
            rows = [(step.batch, rows) for step, rows in pairs if step.epoch == epoch]
            num_same = [
                sum(rows_of(batches[number]) == own for number, own in rows)
                for batches in self.passes[first : first + _NUM_PASSES]
            ]
            best = first + num_same.index(max(num_same))
            found += [self.passes[best][number] for number, _ in rows]
            first = best + 1
        return found


class CaseData:
    """Creates the dataset of a case as often as needed.

    Args:
        case: the case, which defines the dataset.
        global_batch_size: size of its batches.
        num_steps: number of first steps to check, if the dataset has that many.
        has_second_epoch: whether to check the first step of the second epoch, too.

    Attributes:
        first_size: number of examples in the first batch.
        num_batches: number of batches of an epoch; None if the dataset is infinite.
        steps: the steps to check before a resume.

    Raises:
        DataError: the dataset is empty, or two calls of `data` return different batches.
    """

    def __init__(
        self,
        case: CaseFile,
        global_batch_size: int,
        num_steps: int,
        *,
        has_second_epoch: bool = True,
    ):
        self._case, self._size = case, global_batch_size
        self._class_weight = case.fit_arguments().get("class_weight")
        self._batches, again = (self._read(self.dataset().take(num_steps)) for _ in range(2))
        if not self._batches:
            raise DataError("data() has no batch; return a data set with at least one batch")
        _check_batches(self._batches, again)
        self.first_size, self.num_batches = len(self._batches[0][0]), self._count()
        self.steps = [Step(0, i, f"step {i + 1}") for i in range(len(self._batches))]
        if self.num_batches is not None:
            last = self.num_batches - 1
            if last >= len(self._batches):
                self._batches += self._read(self._only([last]))
                name = f"the last batch of an epoch ({len(self._batches[-1][0])} examples)"
                self.steps.append(Step(0, last, name))
            if has_second_epoch:
                self.steps.append(Step(1, 0, "the first step of the second epoch"))

    def dataset(self) -> tf.data.Dataset:
        """Returns a newly created dataset."""
        return self._case.create_data(self._size)

    def _weighted(self, dataset: tf.data.Dataset) -> tf.data.Dataset:
        """Adds the sample weights that `fit` derives from class weights, if the case has any."""
        if not self._class_weight:
            return dataset
        size = max(self._class_weight) + 1
        weights = tf.constant([float(self._class_weight.get(i, 1)) for i in range(size)])

        @tf.autograph.experimental.do_not_convert
        def add(x: Any, y: Any, *others: tf.Tensor) -> tuple:
            if others or not tf.is_tensor(y):
                return x, y, *others  # `fit` refuses them.
            is_one_hot = y.shape.rank > 1 and y.shape[-1] != 1
            classes = tf.argmax(y, -1) if is_one_hot else tf.cast(tf.round(y), tf.int64)
            if not is_one_hot and y.shape.rank > 1:
                classes = tf.squeeze(classes, -1)
            return x, y, tf.gather(weights, classes)

        return self._case.run(lambda: dataset.map(add), "while class weights were applied")

    def part(self, steps: Sequence[Step], *, is_distributed: bool = False) -> Part:
        """Returns a part with some steps.

        Args:
            steps: the steps, in order.
            is_distributed: whether the case distributes all of its data itself.
        """
        batches = sorted({step.batch for step in steps})
        if batches[0] + 1 == self.num_batches:  # `fit` fails if the first batch is a short one.
            batches = sorted({0, *batches})
        dataset = self._only(batches)
        weighted = self._weighted(dataset)
        passes = [
            dict(zip(batches, self._read(weighted), strict=True))
            for _ in range((steps[-1].epoch + 1) * _NUM_PASSES)
        ]
        trained = range(self.num_batches or len(steps)) if is_distributed else batches
        wanted = [step.epoch * len(trained) + trained.index(step.batch) for step in steps]
        return Part(steps, None if is_distributed else self._only(batches), wanted, passes)

    def _only(self, batches: Sequence[int]) -> tf.data.Dataset:
        """Returns the dataset with only some batches, whose numbers are ascending."""
        numbers = tf.constant(batches, tf.int64)
        dataset = self.dataset().take(batches[-1] + 1).enumerate()
        as_written = tf.autograph.experimental.do_not_convert
        is_one = as_written(lambda number, batch: tf.reduce_any(number == numbers))
        dataset = dataset.filter(is_one).map(as_written(lambda number, batch: batch))
        return dataset.apply(tf.data.experimental.assert_cardinality(len(batches)))

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
        joined = [tf.constant(np.concatenate(parts)) for parts in zip(*self._batches, strict=True)]
        dataset = tf.data.Dataset.from_tensor_slices(tuple(joined)).batch(self.first_size)
        spec = self.dataset().element_spec

        @tf.autograph.experimental.do_not_convert
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
