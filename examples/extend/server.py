"""A parameter server: one device sums the gradients, updates and sends the weights."""

import tensorflow as tf

from strategies.base import BatchIterator, Shard, StepTotals, sum_of_losses
from strategies.manual import ManualStrategy, all_reduce, split_batch


class ServerStrategy(ManualStrategy):
    """Updates on the first device, and copies weights and optimizer state to the others."""

    name = "server"

    def train_step(self, iterator: BatchIterator) -> StepTotals:
        """Makes one update on the server, and copies the result."""
        shards = split_batch(next(iterator), self.devices)
        gradients, totals = [], []
        for replica_id, shard in enumerate(shards):
            with tf.device(self.devices[replica_id]):
                own, of_shard = self.gradients_of(replica_id, shard)
            gradients.append(own)
            totals.append(of_shard)
        sums, *_ = all_reduce(gradients, self.devices)
        server, *others = self.replicas
        with tf.device(self.devices[0]):
            server.optimizer.apply(sums, server.model.trainable_variables)
            self.observer.on_update(0, sums)
        updated = server.model.trainable_variables + server.optimizer.variables
        for replica_id, replica in enumerate(others, start=1):
            own = replica.model.trainable_variables + replica.optimizer.variables
            with tf.device(self.devices[replica_id]):
                for variable, new in zip(own, updated, strict=True):
                    variable.assign(new)
                self.observer.on_update(replica_id, sums)
        return StepTotals.sum(totals)

    def gradients_of(self, replica_id: int, shard: Shard) -> tuple[list[tf.Tensor], StepTotals]:
        """Returns the gradients and the totals of a shard, on the current device."""
        replica = self.replicas[replica_id]
        with tf.GradientTape() as tape:
            logits = replica.model(shard.images, training=True)
            loss_sum = sum_of_losses(logits, shard.labels, self.label_smoothing)
            loss = loss_sum / tf.cast(shard.num_global_examples, tf.float32)
        own = tape.gradient(loss, replica.weights)
        own = self.observer.on_shard(replica_id, shard, logits, loss, own)
        return own, StepTotals.of(logits, shard.labels)
