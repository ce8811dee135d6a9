"""What the training loop knows of the data, whether they are images or those of a case."""

from typing import Protocol

import tensorflow as tf


class TrainingData(Protocol):
    """Training and test data."""

    @property
    def name(self) -> str:
        """What the data are called in plots and files."""

    @property
    def num_train_examples(self) -> int:
        """Number of examples of an epoch."""

    @property
    def num_test_examples(self) -> int:
        """Number of examples that are evaluated."""

    @property
    def evaluates_training_data(self) -> bool:
        """Whether there are no data to evaluate on but those of the training."""

    def sha256(self) -> str:
        """Returns a hash of all examples, in order."""

    def sha256_of_test_part(self) -> str:
        """Returns a hash of the examples that are evaluated."""

    def batches_to_evaluate(self) -> tf.data.Dataset:
        """Returns the examples to evaluate in batches: finite, of known cardinality."""
