"""Sums of loss, correct predictions and examples."""

import functools
from collections.abc import Sequence
from typing import NamedTuple

import tensorflow as tf


class StepTotals(NamedTuple):
    """Sums over examples, never means: sums of shards, batches and calls simply add up.

    Each field is a scalar, a tensor inside a compiled step and a Python number outside. The loss
    is a float64: float32 losses of a few thousand batches add up in it without rounding, so that
    the total does not depend on how many steps were put into one call.
    """

    loss_sum: tf.Tensor | float
    correct: tf.Tensor | int
    examples: tf.Tensor | int

    @classmethod
    def zeros(cls) -> "StepTotals":
        """Returns totals over no examples, as tensors."""
        return cls(tf.zeros([], tf.float64), tf.zeros([], tf.int64), tf.zeros([], tf.int64))

    def plus(self, other: "StepTotals") -> "StepTotals":
        """Returns the totals over the examples of both."""
        return StepTotals(*(a + b for a, b in zip(self, other, strict=True)))

    @classmethod
    def sum(cls, many: "Sequence[StepTotals]") -> "StepTotals":
        """Returns the totals over the examples of all, added from the first to the last."""
        return functools.reduce(cls.plus, many)

    @property
    def loss(self) -> float:
        """Mean loss of an example."""
        return self.loss_sum / self.examples

    @property
    def accuracy(self) -> float:
        """Fraction of the examples that were classified correctly, in [0, 1]."""
        return self.correct / self.examples
