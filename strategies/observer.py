"""Defines the hooks of a training step, used to record steps and to inject faults."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import tensorflow as tf

from strategies.schedules import Task


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

    The shared code of the strategies calls these methods. `verify` uses an observer that records
    each step, and `--inject` one that injects a fault.
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

    def on_weights(
        self, device_id: int, weights: Mapping[str, tf.Tensor]
    ) -> Mapping[str, tf.Tensor]:
        """Returns the weights that a device uses in its computations.

        Called for strategies whose devices hold parts of the weights or gather them, while the step
        is traced, on the device.

        Args:
            device_id: number of the device.
            weights: path of a variable → its value, or the device's part of it.
        """
        return weights

    def on_pieces(self, device_id: int, pieces: list[tf.Tensor]) -> list[tf.Tensor]:
        """Returns the terms that a device adds in the backward pass of a gather.

        Called while the step is traced, on the device that adds.

        Args:
            device_id: number of the device in its gather group.
            pieces: one term per device, in order of devices.
        """
        return pieces

    def on_task(
        self, replica_id: int, task: Task, tensors: list[tf.Tensor], *, ends: bool
    ) -> list[tf.Tensor]:
        """Returns the inputs or the outputs of a pipeline task.

        Called at the beginning and at the end of each task while the step is traced, on the task's
        device. The task computes with the tensors returned at its beginning; the next tasks receive
        the tensors returned at its end.

        Args:
            replica_id: number of the pipeline.
            task: a pass of a micro-batch through a stage.
            tensors: the inputs of the task, or its outputs if `ends`.
            ends: whether the task ends.
        """
        return tensors

    def on_average(
        self,
        per_shard_statistics: Sequence[Sequence[np.ndarray]],
        averages: Mapping[str, np.ndarray],
    ) -> Mapping[str, np.ndarray]:
        """Returns the BatchNorm statistics to evaluate and save.

        Called between steps, whenever the averaged statistics are read.

        Args:
            per_shard_statistics: moving statistics of each shard, in the order of `averages`.
            averages: variable name → mean over the shards.
        """
        return averages
