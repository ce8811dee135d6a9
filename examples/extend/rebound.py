"""A strategy with the mistake of `docs/wrong_all_reduce.md`: the sum is not written into gradients.

`verify` finds it; do not train with it.
"""

from typing import Any

import tensorflow as tf

from strategies.base import BatchIterator, ModelFn, OptimizerFn
from strategies.manual import ManualStrategy, split_batch
from strategies.step_totals import StepTotals


def wrong_all_reduce(data: list[Any]) -> None:
    """Sums into the first variable, then replaces the list's other items by copies."""
    for i in range(1, len(data)):
        data[0].assign_add(data[i])
    for i in range(1, len(data)):
        with tf.device(data[i].device):
            data[i] = tf.identity(data[0])


class ReboundStrategy(ManualStrategy):
    """Holds the gradients of each replica in variables, as PyTorch does in `param.grad`."""

    name = "rebound"

    def build(self, model_fn: ModelFn, optimizer_fn: OptimizerFn) -> None:
        """Builds the replicas, and a variable for each gradient of each replica."""
        super().build(model_fn, optimizer_fn)
        self.per_replica_gradients = []
        for replica in self.replicas:
            with tf.device(replica.device):
                zeros = [tf.zeros_like(weight) for weight in replica.model.trainable_variables]
                self.per_replica_gradients.append([tf.Variable(zero) for zero in zeros])

    def train_step(self, iterator: BatchIterator) -> StepTotals:
        """Makes one update on each replica, with the gradients that its variables hold."""
        images, labels = next(iterator)
        shards = split_batch((images, labels), self.devices, self.bounds(tf.size(labels)))
        computed, per_replica_totals = self.gradients(self.replicas, shards, tf.size(labels))
        for variables, gradients in zip(self.per_replica_gradients, computed, strict=True):
            for variable, gradient in zip(variables, gradients, strict=True):
                variable.assign(gradient)
        for copies in zip(*self.per_replica_gradients, strict=True):
            wrong_all_reduce(list(copies))
        for replica, variables in zip(self.replicas, self.per_replica_gradients, strict=True):
            with tf.device(replica.device):
                self.apply_gradients(replica, [variable.read_value() for variable in variables])
        return StepTotals.sum(per_replica_totals)
