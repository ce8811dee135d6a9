"""Training on one device: what every other strategy is compared with."""

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from strategies.base import (
    BatchIterator,
    LogitsAndTotals,
    LossAndGradients,
    ModelFn,
    OptimizerFn,
    StepTotals,
    Strategy,
    classify,
)
from strategies.collectives import PerReplicaTensors
from strategies.loss import differentiate, shard_loss
from strategies.observer import Shard


class SingleStrategy(Strategy):
    """One model on one device; the global batch is its only shard."""

    name = "single"

    def __init__(self, devices: Sequence[str], **options: Any):
        super().__init__(devices, **options)
        if len(devices) != 1:
            raise ValueError(f"strategy single on {len(devices)} devices — one device is required")

    def default_all_reduce(self) -> str:
        return "none"

    def build(self, model_fn: ModelFn, optimizer_fn: OptimizerFn) -> None:
        with tf.device(self.devices[0]):
            self.model, self.optimizer = model_fn(), optimizer_fn()
            self.optimizer.build(self.model.trainable_variables)

    def train_step(self, iterator: BatchIterator) -> StepTotals:
        images, labels = next(iterator)
        with tf.device(self.devices[0]):
            loss, totals, gradients = self.compiled(self._gradients)(images, labels)
            shard = Shard(images, labels, tf.size(labels))
            gradients = self.observer.before_all_reduce(0, shard, loss, gradients)
            gradients = self.observer.after_all_reduce(0, gradients)  # Nothing to exchange it with.
            self.optimizer.apply(gradients, self.model.trainable_variables)
        return totals

    def _gradients(self, images: tf.Tensor, labels: tf.Tensor) -> LossAndGradients:
        with tf.GradientTape() as tape:
            logits = self.model(images, training=True)
            loss, totals = shard_loss(
                logits, labels, tf.size(labels), label_smoothing=self.label_smoothing
            )
        variables = self.model.trainable_variables
        gradients = differentiate(tape, loss, variables, loss_scale=self.loss_scale)
        return loss, totals, gradients

    def all_reduce(self, per_replica_tensors: PerReplicaTensors) -> PerReplicaTensors:
        return per_replica_tensors

    def repeat_all_reduce(
        self, per_replica_tensors: PerReplicaTensors, num_times: int
    ) -> PerReplicaTensors:
        return per_replica_tensors

    def forward(self, iterator: BatchIterator) -> list[LogitsAndTotals]:
        images, labels = next(iterator)
        with tf.device(self.devices[0]):
            logits = classify(self.model, images)
            _, totals = shard_loss(logits, labels, tf.size(labels))
        return [(logits, totals)]

    def distribute(self, dataset: tf.data.Dataset) -> BatchIterator:
        return iter(dataset)

    def replica_variables(self) -> list[list[tf.Variable]]:
        return [[v.value for v in self.model.variables + self.optimizer.variables]]
