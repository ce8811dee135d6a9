"""Defines the hooks of a training step, used to record steps and to inject faults."""

from typing import NamedTuple

import tensorflow as tf


class Shard(NamedTuple):
    """Holds the examples of one shard of a step.

    Attributes:
        images: uint8 `(n_r, height, width, channels)`.
        labels: int32 `(n_r,)`.
        num_global_examples: int scalar, number of examples in the global batch.
        logits: `(n_r, num_classes)`, in the layers' dtype; None until they are computed.
    """

    images: tf.Tensor
    labels: tf.Tensor
    num_global_examples: tf.Tensor
    logits: tf.Tensor | None = None


class Observer:
    """Defines the hooks of a training step; the default methods change nothing.

    `verify` uses an observer that records each step, and `--inject` one that injects a fault.
    """

    def on_shard(
        self, shard_id: int | tf.Tensor, shard: Shard, loss: tf.Tensor, gradients: list[tf.Tensor]
    ) -> list[tf.Tensor]:
        """Returns the gradients of a shard to sum over the shards.

        Called for each shard while the step is traced, on the shard's device.

        Args:
            shard_id: an int, or an int scalar tensor.
            shard: the examples of the shard.
            loss: scalar, the shard's part of the mean loss of the global batch.
            gradients: gradients of `loss`, one per trainable variable, before the all-reduce.
        """
        return gradients

    def on_update(self, copy_id: int | tf.Tensor, summed_gradients: list[tf.Tensor]) -> None:
        """Observes the update of a copy of the weights.

        Called for each copy while the step is traced, on the copy's device, after its update.

        Args:
            copy_id: an int, or an int scalar tensor.
            summed_gradients: sums over all shards, one per trainable variable.
        """
        return  # AutoGraph cannot transform a function without a statement.
