"""A parameter server: one device sums the gradients, updates and sends the weights."""

import tensorflow as tf

from strategies.base import BatchIterator
from strategies.collectives import PerReplicaTensors, add_in_order, scatter
from strategies.manual import ManualStrategy
from strategies.step_totals import StepTotals


class ServerStrategy(ManualStrategy):
    """Updates on the first device and copies weights and optimizer state to the others."""

    name = "server"

    def train_step(self, iterator: BatchIterator) -> StepTotals:
        """Makes one update on the server and copies the result."""
        images, labels = next(iterator)
        shards = scatter((images, labels), self.devices, self.bounds(tf.size(labels)))
        per_replica_gradients, per_replica_totals = [], []
        for replica, shard in zip(self.replicas, shards, strict=True):
            with tf.device(replica.device):
                gradients, totals = self.local_gradients(replica, shard, tf.size(labels))
            per_replica_gradients.append(gradients)
            per_replica_totals.append(totals)
        sums, *_ = self.all_reduce(per_replica_gradients)
        server, *others = self.replicas
        with tf.device(server.device):
            self.apply_gradients(server, sums)
        updated = server.model.trainable_variables + server.optimizer.variables
        for replica in others:
            own = replica.model.trainable_variables + replica.optimizer.variables
            with tf.device(replica.device):
                for variable, new in zip(own, updated, strict=True):
                    variable.assign(new)
                self.observer.on_update(replica.replica_id, sums)
        return StepTotals.sum(per_replica_totals)

    def all_reduce(self, per_replica_tensors: PerReplicaTensors) -> PerReplicaTensors:
        """Sums on the first device, in replica order; the sums stay there."""
        with tf.device(self.devices[0]):
            sums = [add_in_order(copies) for copies in zip(*per_replica_tensors, strict=True)]
        return [sums] * len(self.devices)
