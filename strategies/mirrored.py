"""Implements the same data parallelism with `tf.distribute.MirroredStrategy`.

The parts of `train_step` are numbered as in `manual.py`.
"""

import functools
from collections.abc import Sequence
from typing import Any, ClassVar

import keras
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
from strategies.collectives import PerReplicaTensors, add_in_order, weighted_bounds
from strategies.copies import Variables
from strategies.replica import Replica
from strategies.tf_private import disable_optimizer_all_reduce, flatten_layers

Shard = tuple[tf.Tensor, ...]  # Images and labels.

# All-reduce algorithm → TensorFlow's implementation. `reduce_to_one` adds in the same order as
# `manual`, so that both are bitwise identical. `ring` is MirroredStrategy's default on CPUs.
CROSS_DEVICE_OPS = {
    "reduce_to_one": lambda: tf.distribute.ReductionToOneDevice(accumulation_fn=add_in_order),
    "nccl": tf.distribute.NcclAllReduce,
    "hierarchical": tf.distribute.HierarchicalCopyAllReduce,
    "ring": lambda: None,
}


class MirroredStrategy(Strategy):
    """Runs a custom training step in `strategy.run`; Keras' `fit` is not used.

    In a replica context, a Keras optimizer sums the gradients over the replicas. This is disabled,
    because the training step has already summed them.
    """

    name = "mirrored"
    # Algorithm → the only device type that it supports.
    device_kinds: ClassVar = {"nccl": "GPU", "ring": "CPU"}

    def __init__(self, devices: Sequence[str], **options: Any):
        super().__init__(devices, **options)
        kind = self.device_kinds.get(self.algorithm)
        if kind and not all(kind in device for device in self.devices):
            raise ValueError(
                f"--all_reduce={self.algorithm} with strategy {self.name} needs {kind}s, got"
                f" {self.devices}"
            )
        self._tf_strategy = self._create_tf_strategy()
        num_created = self._tf_strategy.num_replicas_in_sync
        if num_created != self.num_devices:
            raise ValueError(
                f"{type(self._tf_strategy).__name__} created {num_created} replicas on"
                f" {self.devices}"
            )

    def _create_tf_strategy(self) -> tf.distribute.Strategy:
        return tf.distribute.MirroredStrategy(
            self.devices, cross_device_ops=CROSS_DEVICE_OPS.get(self.algorithm, lambda: None)()
        )

    def default_all_reduce(self) -> str:
        return "nccl" if "GPU" in self.devices[0] and self.num_devices > 1 else "reduce_to_one"

    def build(self, model_fn: ModelFn, optimizer_fn: OptimizerFn) -> None:
        with self._tf_strategy.scope():
            self.model, self.optimizer = self.build_replica(model_fn, optimizer_fn)
            statistics = self.new_statistics(self.model)
        # A template: `tf.distribute` runs one replica of it on each device.
        self.replicas = [Replica(0, "", self.model, self.optimizer, statistics)]
        if self.syncs_batch_norm:
            for layer in flatten_layers(self.model):
                if isinstance(layer, keras.layers.BatchNormalization):
                    layer.synchronized = True
        disable_optimizer_all_reduce(self.optimizer)

    def distribute(self, dataset: tf.data.Dataset) -> BatchIterator:
        """Distributes the shards of each global batch to the replicas in order.

        `experimental_distribute_dataset` rounds shard sizes up, 4 over 3 as 2, 2, 0, which can
        leave a replica without examples. Here each shard is a dataset element, in replica order,
        together with the size of its global batch.
        """

        def to_shards(*batch: tf.Tensor) -> tf.data.Dataset:
            num_examples = tf.shape(batch[0])[0]

            def to_shard(replica_id: tf.Tensor) -> tuple[Shard, tf.Tensor]:
                start, end = weighted_bounds(num_examples, self.replica_weights, replica_id)
                shard = tuple(tensor[start:end] for tensor in batch)
                return shard, num_examples

            ids = self._local(self.num_replicas)
            return tf.data.Dataset.range(ids.start, ids.stop, output_type=tf.int32).map(to_shard)

        shards = dataset.flat_map(to_shards)
        # With an infinite cardinality, a step does not check for the end of the dataset.
        endless = tf.data.experimental.assert_cardinality(tf.data.INFINITE_CARDINALITY)
        return iter(
            self._tf_strategy.distribute_datasets_from_function(lambda _: shards.apply(endless))
        )

    def train_step(self, iterator: BatchIterator) -> StepTotals:
        def replica_step(shard: Shard, num_examples: tf.Tensor) -> StepTotals:
            replica = self._replica()  # 1. `distribute` has split the batch.
            gradients, totals = self.local_gradients(replica, shard, num_examples)  # 2. Gradients.
            sums = self._sum_over_replicas(gradients)  # 3. All-reduce (sum).
            self.apply_gradients(replica, sums)  # 4. The same update everywhere.
            return totals

        per_replica_totals = self._tf_strategy.run(replica_step, args=next(iterator))
        return StepTotals.sum(self._per_replica(per_replica_totals))

    def _replica(self) -> Replica:
        """Returns the current replica, in replica context."""
        replica_id = tf.distribute.get_replica_context().replica_id_in_sync_group
        return self.replicas[0]._replace(replica_id=replica_id)

    def _sum_over_replicas(self, tensors: list[tf.Tensor]) -> list[tf.Tensor]:
        """Sums tensors with TensorFlow's cross-device ops, in replica context."""
        if self.algorithm == "none":
            return tensors
        buckets = self.gradient_buckets(tensors)
        return buckets.unpack(self._sum_packed(buckets.pack(tensors)))

    def _sum_packed(self, tensors: list[tf.Tensor]) -> list[tf.Tensor]:
        """Sums buckets with TensorFlow's cross-device ops, in replica context.

        Equals `ReplicaContext.all_reduce` without its gradient, which is not needed here. For that
        gradient TensorFlow traverses the graph of all replicas once per replica (21 of 30 s of
        tracing LeNet for 64 replicas) and adds an `IdentityN` over all sums.
        """

        def sum_over_replicas(strategy: tf.distribute.Strategy, *values: Any) -> list[Any]:
            # With a value as its own destination, each replica's device receives the sum.
            pairs = [(value, value) for value in values]
            return strategy.extended.batch_reduce_to(tf.distribute.ReduceOp.SUM, pairs)

        context = tf.distribute.get_replica_context()
        return context.merge_call(sum_over_replicas, args=tensors)

    @tf.function(autograph=False)
    def all_reduce(self, per_replica_tensors: PerReplicaTensors) -> PerReplicaTensors:
        def tensor_of(copies: Sequence[tf.Tensor], context: Any) -> tf.Tensor:
            return copies[context.replica_id_in_sync_group - self._local(self.num_replicas).start]

        def sum_over_replicas(tensors: list[tf.Tensor]) -> list[tf.Tensor]:
            # `identity` places the tensors on the replica's device, which NCCL requires; arguments
            # of a graph have no device.
            return self._sum_over_replicas([tf.identity(tensor) for tensor in tensors])

        values = [
            self._tf_strategy.experimental_distribute_values_from_function(
                functools.partial(tensor_of, copies)
            )
            for copies in zip(*per_replica_tensors, strict=True)
        ]
        return self._per_replica(self._tf_strategy.run(sum_over_replicas, args=(values,)))

    def forward(self, iterator: BatchIterator, statistics: Statistics) -> list[LogitsAndTotals]:
        def replica_forward(shard: Shard, num_global_examples: tf.Tensor) -> LogitsAndTotals:
            return self.classify(self._replica(), shard, num_global_examples, statistics)

        return self._per_replica(self._tf_strategy.run(replica_forward, args=next(iterator)))

    def copies(self) -> list[Variables]:
        variables = self.named_variables(self.model, self.optimizer)
        per_variable_copies = map(self._tf_strategy.experimental_local_results, variables.values())
        return [
            dict(zip(variables, copies, strict=True))
            for copies in zip(*per_variable_copies, strict=True)
        ]

    def shard_variables(self) -> list[Variables]:
        per_shard = super().shard_variables()
        if not self.replicas[0].statistics:
            return per_shard
        # `per_shard` has the template's variables, of which each replica has its own copy.
        local = self._tf_strategy.experimental_local_results
        return [
            {name: local(variable)[r] for name, variable in own.items()}
            for r in range(len(self.local_devices))
            for own in per_shard
        ]

    def _per_replica(self, distributed: Any) -> list[Any]:
        """Converts a structure of per-replica values to a list with one structure per replica."""
        leaves = [
            self._tf_strategy.experimental_local_results(v) for v in tf.nest.flatten(distributed)
        ]
        return [
            tf.nest.pack_sequence_as(distributed, replica_leaves)
            for replica_leaves in zip(*leaves, strict=True)
        ]
