"""Implements a reference that computes several shards in parallel, for running trainings."""

import concurrent.futures
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from app.verification.reference import Arrays, Forward, Reference, ShardResult


class ParallelReference(Reference):
    """A reference that computes shards in parallel, as replicas do.

    Weights and statistics are arguments of the compiled function, so that calls share no variables.
    The results are those of `Reference`, bitwise identical without label smoothing.

    Args:
        *arguments: arguments of `Reference`.
        num_threads: number of shards to compute in parallel.
        **options: options of `Reference`.
    """

    def __init__(self, *arguments: Any, num_threads: int = 1, **options: Any):
        super().__init__(*arguments, **options)
        self._num_threads = num_threads
        spec = tf.TensorSpec
        self._function = tf.function(
            self._from_values,
            input_signature=[
                [spec(v.shape, v.dtype) for v in self._weights.values()],
                [spec(v.shape, v.dtype) for v in self._statistics.values()],
                spec((None, *self._model.input_shape[1:]), tf.uint8),
                spec((None,), tf.int32),
                spec((), self._dtype),
            ],
        )

    def compile(self) -> None:
        """Traces the computation of a shard."""
        self._function.get_concrete_function()

    def gradients(
        self,
        before: Mapping[str, np.ndarray],
        images: np.ndarray,
        labels: np.ndarray,
        shards: Sequence[np.ndarray],
        *,
        per_shard_statistics: Sequence[Mapping[str, np.ndarray]] | None = None,
        forward: Forward | None = None,
    ) -> list[ShardResult]:
        """Computes the contribution of each shard; see `Reference.gradients`."""
        if forward:
            return super().gradients(
                before, images, labels, shards, per_shard_statistics=per_shard_statistics,
                forward=forward,
            )  # fmt: skip
        self._assign_loss_scale(before)
        weights = [tf.constant(before[name]) for name in self._weights]
        total = tf.constant(len(labels), self._dtype)

        def compute(rows: np.ndarray, statistics: Mapping[str, np.ndarray]) -> ShardResult:
            loss, gradients, new = self._function(
                weights,
                [tf.constant(statistics[name]) for name in self._statistics],
                tf.constant(images[rows]),
                tf.constant(labels[rows], tf.int32),
                total,
            )
            return ShardResult(
                loss.numpy(), _named(self._weights, gradients), _named(self._statistics, new)
            )

        per_shard = per_shard_statistics or [before] * len(shards)
        with concurrent.futures.ThreadPoolExecutor(self._num_threads) as pool:
            return list(pool.map(compute, shards, per_shard))

    def _loss(
        self, logits: tf.Tensor, labels: tf.Tensor, num_global_examples: tf.Tensor
    ) -> tf.Tensor:
        """Returns the loss of `Reference`, in the order of operations of a training step.

        Another order is equally exact, but results would not be bitwise equal.
        """
        logits = tf.cast(logits, self._dtype)
        loss = tf.reduce_sum(tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits))
        if smoothing := self._label_smoothing:
            evenly = tf.reduce_logsumexp(logits, axis=-1) - tf.reduce_mean(logits, axis=-1)
            loss = (1 - smoothing) * loss + smoothing * tf.reduce_sum(evenly)
        return loss / num_global_examples

    def _from_values(
        self,
        weights: list[tf.Tensor],
        statistics: list[tf.Tensor],
        images: tf.Tensor,
        labels: tf.Tensor,
        num_global_examples: tf.Tensor,
    ) -> tuple[tf.Tensor, list[tf.Tensor], list[tf.Tensor]]:
        with tf.GradientTape() as tape:
            tape.watch(weights)
            logits, new = self._model.stateless_call(weights, statistics, images, training=True)
            loss = self._loss(logits, labels, num_global_examples)
        return loss, self._differentiate(tape, loss, weights), new


def _named(names: Mapping[str, Any], tensors: Sequence[tf.Tensor]) -> Arrays:
    return {name: tensor.numpy() for name, tensor in zip(names, tensors, strict=True)}
