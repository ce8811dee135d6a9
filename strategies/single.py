"""Training on one device: what every other strategy is compared with."""

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from strategies.base import (
    BatchIterator,
    LogitsAndTotals,
    ModelFn,
    OptimizerFn,
    Replica,
    Statistics,
    StepTotals,
    Strategy,
)
from strategies.copies import Variables


class SingleStrategy(Strategy):
    """One model on one device; the global batch is its only shard."""

    name = "single"

    def __init__(self, devices: Sequence[str], **options: Any):
        super().__init__(devices, **options)
        if len(devices) != 1:
            raise ValueError(f"strategy single needs one device, got {len(devices)}")

    def default_all_reduce(self) -> str:
        return "none"

    def build(self, model_fn: ModelFn, optimizer_fn: OptimizerFn) -> None:
        with tf.device(self.devices[0]):
            self.model, self.optimizer = model_fn(), optimizer_fn()
            self.optimizer.build(self.model.trainable_variables)
            statistics = self.new_statistics(self.model)
        self.replicas = [Replica(0, self.devices[0], self.model, self.optimizer, statistics)]

    def train_step(self, iterator: BatchIterator) -> StepTotals:
        images, labels = next(iterator)
        with tf.device(self.devices[0]):
            gradients, totals = self.local_gradients(
                self.replicas[0], (images, labels), tf.size(labels)
            )
            self.apply_gradients(self.replicas[0], gradients)
        return totals

    def forward(self, iterator: BatchIterator, statistics: Statistics) -> list[LogitsAndTotals]:
        images, labels = next(iterator)
        with tf.device(self.devices[0]):
            examples = images, labels
            return [self.classify(self.replicas[0], examples, tf.size(labels), statistics)]

    def copies(self) -> list[Variables]:
        return [self.named_variables(self.model, self.optimizer)]
