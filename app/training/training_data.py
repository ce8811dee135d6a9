"""Defines the interface of the training data, of images and of cases."""

from typing import Protocol

import tensorflow as tf


class TrainingData(Protocol):
    """Training and test data."""

    @property
    def name(self) -> str:
        """Name of the data in plots and files."""

    @property
    def num_train_examples(self) -> int:
        """Number of examples per epoch."""

    @property
    def num_test_examples(self) -> int:
        """Number of evaluated examples."""

    @property
    def evaluates_training_data(self) -> bool:
        """Whether there is no separate test set, so that the training data are evaluated."""

    def sha256(self) -> str:
        """Returns a hash of all examples, in order."""

    def sha256_of_test_part(self) -> str:
        """Returns a hash of the evaluated examples."""

    def batches_to_evaluate(self) -> tf.data.Dataset:
        """Returns the evaluated examples in batches: finite, of known cardinality."""
