"""A place in every step where one can look on, and for teaching interfere, without a debugger."""

from typing import NamedTuple

import tensorflow as tf


class Shard(NamedTuple):
    """What one replica works on in one step.

    Attributes:
        images: uint8 `(n_r, height, width, channels)`.
        labels: int32 `(n_r,)`.
        num_global_examples: int scalar, examples in the whole global batch.
    """

    images: tf.Tensor
    labels: tf.Tensor
    num_global_examples: tf.Tensor


class Observer:
    """Sees what every replica sends into the all-reduce and what it gets back.

    A strategy calls both methods in each training step, for each replica, and goes on with what
    they return. This one returns what it was given, so an ordinary training contains no trace of
    it; `verify` puts one here that writes everything down, and `--inject` one that does harm.

    Both are called while the step is traced, `replica_id` being an int or an int scalar tensor.
    """

    def before_all_reduce(
        self, replica_id: int | tf.Tensor, shard: Shard, loss: tf.Tensor, gradients: list[tf.Tensor]
    ) -> list[tf.Tensor]:
        """Returns the gradients that the replica sends, one for each trainable variable.

        Args:
            replica_id: of the replica, on whose device this is called.
            shard: what it worked on.
            loss: scalar, the part of `shard` in the mean loss of the global batch.
            gradients: of that loss, on this replica alone.
        """
        return gradients

    def after_all_reduce(
        self, replica_id: int | tf.Tensor, sums: list[tf.Tensor]
    ) -> list[tf.Tensor]:
        """Returns the sums over all replicas that this replica updates its weights with."""
        return sums
