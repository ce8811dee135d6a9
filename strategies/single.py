"""Implements training on one device, the reference for all other strategies."""

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from strategies.base import (
    BatchIterator,
    LogitsAndTotals,
    ModelFn,
    OptimizerFn,
    Statistics,
    StepTotals,
    Strategy,
)
from strategies.copies import Variables
from strategies.replica import Replica


class SingleStrategy(Strategy):
    """Trains one model on one device; the global batch is the only shard."""

    name = "single"

    def __init__(self, devices: Sequence[str], **options: Any):
        super().__init__(devices, **options)
        if len(devices) != 1:
            raise ValueError(f"strategy single needs one device, got {len(devices)}")

    def default_all_reduce(self) -> str:
        return "none"

    def build(self, model_fn: ModelFn, optimizer_fn: OptimizerFn) -> None:
        with tf.device(self.devices[0]):
            self.model, self.optimizer = self.build_replica(model_fn, optimizer_fn)
            statistics = self.new_statistics(self.model)
        self.replicas = [Replica(0, self.devices[0], self.model, self.optimizer, statistics)]

    def train_step(self, iterator: BatchIterator) -> StepTotals:
        batch = next(iterator)
        with tf.device(self.devices[0]):
            gradients, totals = self.local_gradients(self.replicas[0], batch, tf.size(batch[1]))
            self.apply_gradients(self.replicas[0], gradients)
        return totals

    def forward(self, iterator: BatchIterator, statistics: Statistics) -> list[LogitsAndTotals]:
        images, labels = next(iterator)
        with tf.device(self.devices[0]):
            examples = images, labels
            return [self.classify(self.replicas[0], examples, tf.size(labels), statistics)]

    def copies(self) -> list[Variables]:
        return [self.named_variables(self.model, self.optimizer)]
