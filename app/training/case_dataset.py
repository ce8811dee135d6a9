"""Reads the datasets of a case once, to count and hash their contents."""

import hashlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from app.config import TrainConfig
from app.config.split_constraints import name_shards
from app.config.split_numbers import fewest_examples
from app.runtime import console
from app.runtime.errors import ConfigError, DataError
from app.training.case_file import CaseFile
from strategies.batch_structure import without_none
from strategies.keras_objective import KerasObjective

_TRAIN, _TEST = "data()", "test_data()"


class Batches(NamedTuple):
    """The contents of a dataset.

    Attributes:
        sizes: examples of each batch.
        sha256: hash of all numbers, in order.
    """

    sizes: list[int]
    sha256: str

    @property
    def num_examples(self) -> int:
        """Number of examples in all batches."""
        return sum(self.sizes)


class CaseDataset:
    """Provides the training and test data of a case.

    The functions of the case are called again for each new dataset, because a dataset that is read
    a second time may be shuffled differently.

    Args:
        config: options with the case.

    Attributes:
        case: the case file.
        objective: the objective that strategies train.
        name: name of the data in plots and files.
        train: contents of an epoch.
        evaluates_training_data: whether the case has no separate test data.

    Raises:
        ConfigError: the file is not a case.
        DataError: a dataset is empty, infinite, without batches, or differs between two reads.
    """

    def __init__(self, config: TrainConfig):
        self._config = config
        self.case = CaseFile(
            config.case_path,
            model_fn=config.case_model_fn,
            data_fn=config.data_fn,
            test_data_fn=config.test_data_fn,
        )
        self.name = self.case.data_label
        keras.utils.set_random_seed(config.seed)
        spec, test_dataset = self._create().element_spec, self._create_test()
        self.objective = KerasObjective(spec)
        self.evaluates_training_data = test_dataset is None
        self.train = self._test = self._read(self._create, _TRAIN)
        if test_dataset is not None:
            _check_same_elements(spec, test_dataset.element_spec)
            self._test = self._read(self._create_test, _TEST)
        self.objective.largest_batch = max(*self.train.sizes, *self._test.sizes)

    @property
    def num_train_examples(self) -> int:
        """Number of examples per epoch."""
        return self.train.num_examples

    @property
    def num_test_examples(self) -> int:
        """Number of evaluated examples."""
        return self._test.num_examples

    def sha256(self) -> str:
        """Returns a hash of all examples of the first epoch and of the evaluation, in order."""
        return hashlib.sha256(f"{self.train.sha256} {self._test.sha256}".encode()).hexdigest()

    def sha256_of_test_part(self) -> str:
        """Returns a hash of the evaluated examples."""
        return self._test.sha256

    def train_batches(self, *, start_step: int) -> tf.data.Dataset:
        """Returns the infinite dataset of global batches from a step on.

        Earlier batches are drawn and dropped, because the order of an epoch may depend on earlier
        ones.
        """
        # The model's random numbers must not change the order. Not repeated before each evaluation:
        # setting the seed makes TensorFlow discard compiled functions, which costs half a second or
        # more.
        keras.utils.set_random_seed(self._config.seed)
        return self.objective.flatten(self._create().repeat().skip(start_step))

    def batches_to_evaluate(self) -> tf.data.Dataset:
        """Returns the evaluated examples in batches."""
        batches = self.objective.flatten(self._create_test() or self._create())
        return batches.apply(tf.data.experimental.assert_cardinality(len(self._test.sizes)))

    def check_shards(self, num_devices: int) -> None:
        """Checks that no shard of a batch is empty.

        Raises:
            ConfigError: a shard would be empty, and a mean over it is NaN.
        """
        config, smallest = self._config, min(self.train.sizes)
        split = config.strategy, config, num_devices
        fewest = fewest_examples(*split)
        if smallest < fewest:
            raise ConfigError(
                f"--case={config.case}: {_TRAIN} has a batch of {smallest}"
                f" example{'s' * (smallest != 1)}, too few for {name_shards(*split)}; use another"
                " --global_batch_size, or batch(…, drop_remainder=True) in the file"
            )

    def _create(self) -> tf.data.Dataset:
        return self.case.create_data(self._config.global_batch_size)

    def _create_test(self) -> tf.data.Dataset | None:
        return self.case.create_test_data(self._config.global_batch_size)

    def _read(self, create: Callable[[], Any], function: str) -> Batches:
        """Counts and hashes the contents of a dataset."""
        where, dataset = f"--case={self._config.case}: {function}", create()
        if int(dataset.cardinality()) == tf.data.INFINITE_CARDINALITY:
            raise DataError(
                f"{where} has no end, so that it has no epochs; return a finite data set, without"
                " repeat() or with take()"
            )
        console.say(f"reading {function} of {self._config.case_path.name} once, to count and hash")
        flat = self.objective.flatten
        first, again, batches = self.case.run(
            lambda: [_count(flat(d), where) for d in (create().take(1), create().take(1), dataset)],
            f"while the data set of {function} was read",
        )
        if not batches.sizes:
            raise DataError(f"{where} has no batch; return a data set with one batch at least")
        if first != again:
            raise DataError(
                f"{where}: batch 1 is another one when the data set is made again; make it"
                " deterministic: give shuffle() and random operations a seed"
            )
        return batches


def _count(flat: Iterable[tuple[tf.Tensor, ...]], where: str) -> Batches:
    digest = hashlib.sha256()
    sizes: list[int] = []
    for batch in flat:
        shapes = [tuple(leaf.shape) for leaf in batch]
        check_shapes(shapes, f"{where}: batch {len(sizes) + 1}")
        sizes.append(shapes[0][0])
        for leaf in batch:
            array = leaf.numpy()
            digest.update(f"{array.dtype}{array.shape}".encode())
            is_text = array.dtype == object
            digest.update(_joined(array) if is_text else np.ascontiguousarray(array).data)
    return Batches(sizes, digest.hexdigest())


def check_shapes(shapes: Sequence[tuple[int, ...]], where: str) -> None:
    """Checks that all parts of a batch have equally many examples.

    Raises:
        DataError: they do not.
    """
    if not all(shapes) or len({shape[0] for shape in shapes}) > 1:
        raise DataError(
            f"{where} has parts of shapes {', '.join(map(str, shapes))}, which do not begin with"
            " one number of examples; call batch(global_batch_size)"
        )


def _joined(texts: np.ndarray) -> bytes:
    return b"".join(b"%d:%b" % (len(text), text) for text in texts.flat)


def _check_same_elements(spec: Any, test_spec: Any) -> None:
    """Checks that test data have the structure of the training data.

    Raises:
        DataError: they do not.
    """
    try:
        tf.nest.assert_same_structure(spec, test_spec)
        flat = (tf.nest.flatten(without_none(each)) for each in (spec, test_spec))
        pairs = [(a, b) for a, b in zip(*flat, strict=True) if a is not None]
        same = all(
            a.dtype == b.dtype and a.shape[1:].is_compatible_with(b.shape[1:]) for a, b in pairs
        )
    except (TypeError, ValueError):
        same = False
    if not same:
        raise DataError(
            f"{_TEST} returns batches of {_shown(test_spec)}, {_TRAIN} of {_shown(spec)}; return"
            " the same parts from both"
        )


def _shown(spec: Any) -> str:
    leaves = tf.nest.flatten(spec)
    return " and ".join(f"{leaf.dtype.name}{leaf.shape}" for leaf in leaves)
