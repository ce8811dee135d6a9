"""Defines the base class of strategies that have one replica on each device of this process.

They share what is not part of their idea: BatchNorm over the batch, the algorithms and buckets of
the all-reduce, evaluation, and the variables of the replicas.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar

import tensorflow as tf

from strategies.base import BatchIterator, Bounds, ModelFn, OptimizerFn, Strategy
from strategies.collectives import ALL_REDUCE_FUNCTIONS, PerReplicaTensors, scatter
from strategies.copies import Variables, named_variables
from strategies.device_tape import DeviceTape
from strategies.evaluation import LogitsAndTotals, Statistics, classify
from strategies.gradient_buckets import in_buckets
from strategies.replica import Replica
from strategies.step_totals import StepTotals
from strategies.sync_batch_norm import check_synchronizable, synchronized_gradients


class ReplicaList(Strategy):
    """Trains one replica on each device.

    Attributes:
        replicas: the replicas in order of devices, after `build`.
        all_reduce_functions: all-reduce algorithm → the function that sums over the replicas.
    """

    replicas: list[Replica]
    all_reduce_functions: ClassVar[Mapping[str, Callable[..., PerReplicaTensors]]] = (
        ALL_REDUCE_FUNCTIONS
    )

    def gather_tapes(self) -> list[DeviceTape]:
        # Synchronised BatchNorm gathers the moments of all replicas.
        return [DeviceTape(self.devices)] if self.syncs_batch_norm else []

    def new_replica(
        self, replica_id: int, device: str, model_fn: ModelFn, optimizer_fn: OptimizerFn
    ) -> Replica:
        replica = super().new_replica(replica_id, device, model_fn, optimizer_fn)
        if self.syncs_batch_norm:
            check_synchronizable(replica.model)
        return replica

    def callable_replicas(self) -> list[Replica]:
        """Returns the replicas with the weights with which a step calls their models."""
        return self.replicas

    def bounds(self, num_examples: tf.Tensor) -> list[Bounds]:
        """Returns the start and end of each replica's part of a batch."""
        return [self.replica_bounds(num_examples, r) for r in range(self.num_replicas)]

    def gradients(
        self,
        replicas: Sequence[Replica],
        shards: Sequence[Sequence[tf.Tensor]],
        num_global_examples: tf.Tensor,
    ) -> tuple[PerReplicaTensors, list[StepTotals]]:
        """Calls `forward_and_backward` for each shard on the device of its replica.

        Args:
            replicas: R replicas, each on its device.
            shards: R tuples of images and labels, each on the device of its replica.
            num_global_examples: int scalar.

        Returns:
            R lists with one gradient per weight, and R totals.
        """
        if self.syncs_batch_norm:  # All replicas call each layer together.
            return synchronized_gradients(self, replicas, shards, num_global_examples)
        per_replica_gradients, per_replica_totals = [], []
        for replica, shard in zip(replicas, shards, strict=True):
            with tf.device(replica.device):
                gradients, totals = self.local_gradients(replica, shard, num_global_examples)
            per_replica_gradients.append(gradients)
            per_replica_totals.append(totals)
        return per_replica_gradients, per_replica_totals

    def all_reduce(self, per_replica_tensors: PerReplicaTensors) -> PerReplicaTensors:
        if self.algorithm == "none":
            return per_replica_tensors
        return in_buckets(
            self.all_reduce_functions[self.algorithm],
            per_replica_tensors,
            self.devices,
            self.gradient_buckets(per_replica_tensors[0]),
        )

    def forward(self, iterator: BatchIterator, statistics: Statistics) -> list[LogitsAndTotals]:
        images, labels = next(iterator)
        shards = scatter((images, labels), self.devices, self.bounds(tf.size(labels)))
        results = []
        for replica, shard in zip(self.callable_replicas(), shards, strict=True):
            with tf.device(replica.device):
                results.append(classify(replica, shard, statistics))
        return results

    def copies(self) -> list[Variables]:
        return [named_variables(replica.model, replica.optimizer) for replica in self.replicas]

    def shard_variables(self) -> list[Variables]:
        return [shard for replica in self.replicas for shard in replica.shard_variables()]
