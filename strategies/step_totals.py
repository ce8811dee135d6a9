"""Defines the sums of loss, correct predictions and examples that a step returns."""

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:  # Checkpoints have totals, and are read without TensorFlow.
    import tensorflow as tf


class StepTotals(NamedTuple):
    """Holds sums over examples, which add up over shards, batches and calls.

    Each field is a scalar: a tensor inside a compiled step and a Python number outside. The loss is
    float64, which sums the float32 losses of a few thousand batches without rounding, so that the
    total does not depend on the number of steps per call.
    """

    loss_sum: "tf.Tensor | float"
    correct: "tf.Tensor | int"
    examples: "tf.Tensor | int"

    @classmethod
    def zeros(cls) -> "StepTotals":
        """Returns totals over no examples, as tensors."""
        import tensorflow as tf

        return cls(tf.zeros([], tf.float64), tf.zeros([], tf.int64), tf.zeros([], tf.int64))

    @classmethod
    def of(cls, logits: "tf.Tensor", labels: "tf.Tensor") -> "StepTotals":
        """Computes the totals of a shard; its loss is without label smoothing, as a test loss is.

        Args:
            logits: float `(n, num_classes)`, n the size of the shard, which may be 0.
            labels: int32 `(n,)`, in 0 to num_classes − 1.
        """
        import tensorflow as tf

        losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, tf.cast(logits, tf.float32))
        predictions = tf.argmax(logits, axis=-1, output_type=labels.dtype)
        return cls(
            loss_sum=tf.cast(tf.reduce_sum(losses), tf.float64),
            correct=tf.math.count_nonzero(predictions == labels),
            examples=tf.size(labels, out_type=tf.int64),
        )

    def plus(self, other: "StepTotals") -> "StepTotals":
        """Returns the sum of these and other totals."""
        return StepTotals(*(a + b for a, b in zip(self, other, strict=True)))

    @classmethod
    def sum(cls, many: "Sequence[StepTotals]") -> "StepTotals":
        """Returns the sum of totals, added in order."""
        return functools.reduce(cls.plus, many)

    @property
    def loss(self) -> float:
        """Mean loss per example."""
        return self.loss_sum / self.examples

    @property
    def accuracy(self) -> float:
        """Fraction of correctly classified examples, in [0, 1]."""
        return self.correct / self.examples
