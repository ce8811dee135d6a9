"""Hooks of a training step, to record it and to inject faults into it."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import tensorflow as tf

from strategies.schedules import Task


class Shard(NamedTuple):
    """The examples that one shard of a step consists of.

    Attributes:
        images: uint8 `(n_r, height, width, channels)`.
        labels: int32 `(n_r,)`.
        num_global_examples: int scalar, examples in the whole global batch.
    """

    images: tf.Tensor
    labels: tf.Tensor
    num_global_examples: tf.Tensor


class Predicted(NamedTuple):
    """What a replica computes for its examples with a compiled Keras model.

    Attributes:
        examples: leaves `(n_r, ...)` of inputs, targets and weights.
        predictions: leaves `(n_r, ...)`; none where the model has a training step of its own.
        masks: of these, None where there is none.
        loss: scalar, the replica's part in the loss; None likewise.
        regular: scalar, what `model.losses` have in it; None likewise.
    """

    examples: Sequence[tf.Tensor]
    predictions: Sequence[tf.Tensor]
    masks: Sequence[tf.Tensor | None]
    loss: tf.Tensor | None
    regular: tf.Tensor | None


class Observer:
    """Observes every step of a strategy; this one adds nothing to it.

    The base class of the strategies calls these methods, which a strategy does not. `verify` uses
    an observer that records each step, and `--inject` one that injects a fault.
    """

    def on_shard(
        self, shard_id: int | tf.Tensor, shard: Shard, loss: tf.Tensor, gradients: list[tf.Tensor]
    ) -> list[tf.Tensor]:
        """Returns the gradients that are summed over the shards.

        Called for each shard while the step is traced, on the shard's device.

        Args:
            shard_id: an int, or an int scalar tensor.
            shard: its examples.
            loss: scalar, the shard's part in the mean loss of the global batch.
            gradients: of that loss, one for each trainable variable, before they are summed.
        """
        return gradients

    def on_predictions(self, replica_id: int | tf.Tensor, predicted: Predicted) -> None:
        """Observes a replica's examples, predictions and loss, with a compiled Keras model.

        Called for each replica while the step is traced, on its device.

        Args:
            replica_id: an int, or an int scalar tensor.
            predicted: what it computes.
        """
        return

    def on_gradients(
        self, replica_id: int | tf.Tensor, gradients: list[tf.Tensor]
    ) -> list[tf.Tensor]:
        """Returns the gradients of a compiled Keras model that are summed over the replicas.

        Called for each replica while the step is traced, on its device.

        Args:
            replica_id: an int, or an int scalar tensor.
            gradients: one for each weight that has one, before they are summed.
        """
        return gradients

    def on_update(self, copy_id: int | tf.Tensor, summed_gradients: list[tf.Tensor]) -> None:
        """Observes the update of a copy of the weights.

        Called for each copy while the step is traced, on the copy's device, after its update.

        Args:
            copy_id: an int, or an int scalar tensor.
            summed_gradients: over all shards, one for each trainable variable.
        """
        return  # AutoGraph cannot transform a function without a statement.

    def on_weights(
        self, device_id: int, weights: Mapping[str, tf.Tensor]
    ) -> Mapping[str, tf.Tensor]:
        """Returns the weights that a device computes with.

        Called where a device holds a part of the weights, or gathers them, while the step is
        traced, on that device.

        Args:
            device_id: its number.
            weights: path of a variable → its value, or the device's part of it.
        """
        return weights

    def on_pieces(self, device_id: int, pieces: list[tf.Tensor]) -> list[tf.Tensor]:
        """Returns what a device adds in the backward pass of a gather.

        Called while the step is traced, on the device that adds.

        Args:
            device_id: its number among those that gather.
            pieces: one of each device, in their order.
        """
        return pieces

    def on_task(
        self, replica_id: int, task: Task, tensors: list[tf.Tensor], *, ends: bool
    ) -> list[tf.Tensor]:
        """Returns what a task of a pipeline works with, or hands on.

        Called at the beginning and at the end of each task while the step is traced, on the task's
        device. All that the task computes is made from what is returned at its beginning, and all
        that waits for it takes what is returned at its end.

        Args:
            replica_id: the number of the pipeline.
            task: a pass of a micro-batch through a stage.
            tensors: what the task takes from elsewhere, or what it has made.
            ends: whether it is the end of the task.
        """
        return tensors

    def on_average(
        self,
        per_shard_statistics: Sequence[Sequence[np.ndarray]],
        averages: Mapping[str, np.ndarray],
    ) -> Mapping[str, np.ndarray]:
        """Returns the BatchNorm statistics that are evaluated and saved.

        Called between steps, whenever these statistics are read.

        Args:
            per_shard_statistics: the moving statistics of each shard, in the order of `averages`.
            averages: variable name → mean over the shards.
        """
        return averages
