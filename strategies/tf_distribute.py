"""Defines the base class of strategies that are made with `tf.distribute`.

They share what is not part of their idea: the checks of devices, synchronised BatchNorm, buckets of
the all-reduce, evaluation, and the conversion of TensorFlow's per-replica values.
"""

import abc
import functools
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import keras
import tensorflow as tf

from strategies.base import BatchIterator, ModelFn, OptimizerFn, Strategy
from strategies.collectives import PerReplicaTensors
from strategies.copies import Variables, named_variables
from strategies.evaluation import LogitsAndTotals, Statistics, classify
from strategies.replica import Replica
from strategies.tf_private import flatten_layers


class TfDistribute(Strategy):
    """Trains replicas that `tf.distribute` places and connects.

    Attributes:
        tf_strategy: TensorFlow's strategy.
        template: the replica that `tf.distribute` runs on each device, after `build`.
        device_kinds: all-reduce algorithm → the only device type that it supports.
    """

    template: Replica
    device_kinds: ClassVar[Mapping[str, str]] = {}

    def prepare(self) -> None:
        kind = self.device_kinds.get(self.algorithm)
        if kind and not all(kind in device for device in self.devices):
            raise ValueError(
                f"--all_reduce={self.algorithm} with strategy {self.name} needs {kind}s, got"
                f" {self.devices}"
            )
        self.tf_strategy = self.create_tf_strategy()
        num_created = self.tf_strategy.num_replicas_in_sync
        if num_created != self.num_devices:
            raise ValueError(
                f"{type(self.tf_strategy).__name__} created {num_created} replicas on"
                f" {self.devices}"
            )

    @abc.abstractmethod
    def create_tf_strategy(self) -> tf.distribute.Strategy:
        """Creates TensorFlow's strategy on the devices."""

    def default_all_reduce(self) -> str:
        return "nccl" if "GPU" in self.devices[0] and self.num_devices > 1 else "reduce_to_one"

    def new_replica(
        self, replica_id: int, device: str, model_fn: ModelFn, optimizer_fn: OptimizerFn
    ) -> Replica:
        replica = super().new_replica(replica_id, device, model_fn, optimizer_fn)
        if self.syncs_batch_norm:
            for layer in flatten_layers(replica.model):
                if isinstance(layer, keras.layers.BatchNormalization):
                    layer.synchronized = True
        return replica

    def local_replica_ids(self) -> tf.data.Dataset:
        """Returns a dataset of the ids of this worker's replicas."""
        ids = self.workers.local_range(self.num_replicas)
        return tf.data.Dataset.range(ids.start, ids.stop, output_type=tf.int32)

    def endless_iterator(self, shards: tf.data.Dataset) -> BatchIterator:
        """Returns an iterator that gives each replica of this worker the next element."""
        # With an infinite cardinality, a step does not check for the end of the dataset.
        endless = tf.data.experimental.assert_cardinality(tf.data.INFINITE_CARDINALITY)
        return iter(
            self.tf_strategy.distribute_datasets_from_function(lambda _: shards.apply(endless))
        )

    def current_replica(self) -> Replica:
        """Returns the current replica, in replica context."""
        replica_id = tf.distribute.get_replica_context().replica_id_in_sync_group
        return self.template._replace(replica_id=replica_id)

    def sum_over_replicas(self, tensors: list[tf.Tensor]) -> list[tf.Tensor]:
        """Sums tensors over the replicas in buckets, in replica context."""
        if self.algorithm == "none":
            return tensors
        buckets = self.gradient_buckets(tensors)
        return buckets.unpack(self.sum_buckets(buckets.pack(tensors)))

    def sum_buckets(self, buckets: list[tf.Tensor]) -> list[tf.Tensor]:
        """Sums buckets with TensorFlow's cross-device ops, in replica context.

        Equals `ReplicaContext.all_reduce` without its gradient, which is not needed here. For that
        gradient TensorFlow traverses the graph of all replicas once per replica (21 of 30 s of
        tracing LeNet for 64 replicas) and adds an `IdentityN` over all sums.
        """

        def sum_values(strategy: tf.distribute.Strategy, *values: Any) -> list[Any]:
            # With a value as its own destination, each replica's device receives the sum.
            pairs = [(value, value) for value in values]
            return strategy.extended.batch_reduce_to(tf.distribute.ReduceOp.SUM, pairs)

        return tf.distribute.get_replica_context().merge_call(sum_values, args=buckets)

    @tf.function(autograph=False)
    def all_reduce(self, per_replica_tensors: PerReplicaTensors) -> PerReplicaTensors:
        first = self.workers.local_range(self.num_replicas).start

        def tensor_of(copies: Sequence[tf.Tensor], context: Any) -> tf.Tensor:
            return copies[context.replica_id_in_sync_group - first]

        def sum_tensors(tensors: list[tf.Tensor]) -> list[tf.Tensor]:
            # `identity` places the tensors on the replica's device, which NCCL requires; arguments
            # of a graph have no device.
            return self.sum_over_replicas([tf.identity(tensor) for tensor in tensors])

        values = [
            self.tf_strategy.experimental_distribute_values_from_function(
                functools.partial(tensor_of, copies)
            )
            for copies in zip(*per_replica_tensors, strict=True)
        ]
        return self.per_replica(self.tf_strategy.run(sum_tensors, args=(values,)))

    def forward(self, iterator: BatchIterator, statistics: Statistics) -> list[LogitsAndTotals]:
        def replica_forward(shard: Sequence[tf.Tensor], _: tf.Tensor) -> LogitsAndTotals:
            return classify(self.current_replica(), shard, statistics)

        return self.per_replica(self.tf_strategy.run(replica_forward, args=next(iterator)))

    def copies(self) -> list[Variables]:
        return self.per_replica(named_variables(self.model, self.optimizer))

    def shard_variables(self) -> list[Variables]:
        per_index = [self.per_replica(named) for named in self.template.shard_variables()]
        return [shard for shards in zip(*per_index, strict=True) for shard in shards]

    def per_replica(self, distributed: Any) -> list[Any]:
        """Converts a structure of per-replica values to a list with one structure per replica."""
        leaves = [
            self.tf_strategy.experimental_local_results(v) for v in tf.nest.flatten(distributed)
        ]
        return [
            tf.nest.pack_sequence_as(distributed, [values[r] for values in leaves])
            for r in range(len(self.local_devices))
        ]
