"""A strategy with the mistake of `docs/wrong_all_reduce.md`: the sum is not written into gradients.

`verify` finds it; do not train with it.
"""

from typing import Any

import tensorflow as tf

from strategies.base import BatchIterator, ModelFn, OptimizerFn, StepTotals, sum_of_losses
from strategies.manual import ManualStrategy, split_batch


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
        for device, replica in zip(self.devices, self.replicas, strict=True):
            with tf.device(device):
                zeros = [tf.zeros_like(weight) for weight in replica.weights]
                self.per_replica_gradients.append([tf.Variable(zero) for zero in zeros])

    def train_step(self, iterator: BatchIterator) -> StepTotals:
        """Makes one update on each replica, with the gradients that its variables hold."""
        shards, totals = split_batch(next(iterator), self.devices), []
        for replica_id, (replica, shard) in enumerate(zip(self.replicas, shards, strict=True)):
            with tf.device(self.devices[replica_id]):
                with tf.GradientTape() as tape:
                    logits = replica.model(shard.images, training=True)
                    loss_sum = sum_of_losses(logits, shard.labels, self.label_smoothing)
                    loss = loss_sum / tf.cast(shard.num_global_examples, tf.float32)
                own = tape.gradient(loss, replica.weights)
                own = self.observer.on_shard(replica_id, shard, logits, loss, own)
                for variable, gradient in zip(
                    self.per_replica_gradients[replica_id], own, strict=True
                ):
                    variable.assign(gradient)
                totals.append(StepTotals.of(logits, shard.labels))
        for copies in zip(*self.per_replica_gradients, strict=True):
            wrong_all_reduce(list(copies))
        for replica_id, replica in enumerate(self.replicas):
            with tf.device(self.devices[replica_id]):
                own = [each.read_value() for each in self.per_replica_gradients[replica_id]]
                replica.optimizer.apply(own, replica.model.trainable_variables)
                self.observer.on_update(replica_id, own)
        return StepTotals.sum(totals)
