"""The same training with `tf.distribute.MirroredStrategy`: TensorFlow keeps the replicas."""

from collections.abc import Sequence
from typing import Any, ClassVar

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
from strategies.collectives import PerReplicaTensors, add_in_order, shard_bounds
from strategies.loss import differentiate, shard_loss
from strategies.observer import Shard
from strategies.tf_private import disable_optimizer_all_reduce

# TensorFlow's all-reduce of each name. `reduce_to_one` adds in the order of our own, so that
# `manual` and `mirrored` are bitwise identical. `ring` is MirroredStrategy's default on CPUs.
CROSS_DEVICE_OPS = {
    "reduce_to_one": lambda: tf.distribute.ReductionToOneDevice(accumulation_fn=add_in_order),
    "nccl": tf.distribute.NcclAllReduce,
    "hierarchical": tf.distribute.HierarchicalCopyAllReduce,
    "ring": lambda: None,
}


class MirroredStrategy(Strategy):
    """Our own loop around `strategy.run`; Keras' `fit` is never used.

    Who does what: we cut each global batch into shards, scale the loss and ask `tf.distribute` to
    add the gradients over the replicas. Keras optimizers would do so on their own in a replica
    context, out of sight; they are told not to, or everything would be counted twice.
    """

    name = "mirrored"
    # Of algorithms that work on one kind of device alone.
    device_kinds: ClassVar = {"nccl": "GPU", "ring": "CPU"}

    def __init__(self, devices: Sequence[str], **options: Any):
        super().__init__(devices, **options)
        kind = self.device_kinds.get(self.algorithm)
        if kind and not all(kind in device for device in self.devices):
            raise ValueError(
                f"all_reduce={self.algorithm} of {self.name} on {self.devices} — {kind}s are"
                " required"
            )
        self._tf_strategy = self._create_tf_strategy()
        num_made = self._tf_strategy.num_replicas_in_sync
        if num_made != self.num_replicas:
            raise ValueError(
                f"{type(self._tf_strategy).__name__} made {num_made} replicas of"
                f" {self.num_replicas} on {self.devices}"
            )

    def _create_tf_strategy(self) -> tf.distribute.Strategy:
        return tf.distribute.MirroredStrategy(
            self.devices, cross_device_ops=CROSS_DEVICE_OPS[self.algorithm]()
        )

    def default_all_reduce(self) -> str:
        return "nccl" if "GPU" in self.devices[0] and self.num_replicas > 1 else "reduce_to_one"

    def build(self, model_fn: ModelFn, optimizer_fn: OptimizerFn) -> None:
        with self._tf_strategy.scope():
            self.model, self.optimizer = model_fn(), optimizer_fn()
            self.optimizer.build(self.model.trainable_variables)
        disable_optimizer_all_reduce(self.optimizer)

    def distribute(self, dataset: tf.data.Dataset) -> BatchIterator:
        """Deals the shards of each global batch to the replicas in turn.

        `experimental_distribute_dataset` would cut the batches by rounding up, 4 over 3 as 2, 2, 0,
        so that a replica can be left with nothing. So the shards are elements of their own here,
        in replica order, each with the size of its global batch.
        """

        def to_shards(images: tf.Tensor, labels: tf.Tensor) -> tf.data.Dataset:
            num_examples = tf.shape(labels)[0]

            def to_shard(replica_id: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
                start, end = shard_bounds(num_examples, self.num_replicas, replica_id)
                return images[start:end], labels[start:end], num_examples

            ids = self.local_replica_ids
            return tf.data.Dataset.range(ids.start, ids.stop, output_type=tf.int32).map(to_shard)

        shards = dataset.flat_map(to_shards)
        # Known to be endless, the set needs no check for its end in each step.
        endless = tf.data.experimental.assert_cardinality(tf.data.INFINITE_CARDINALITY)
        return iter(
            self._tf_strategy.distribute_datasets_from_function(lambda _: shards.apply(endless))
        )

    def train_step(self, iterator: BatchIterator) -> StepTotals:
        def replica_step(
            images: tf.Tensor, labels: tf.Tensor, num_global_examples: tf.Tensor
        ) -> StepTotals:
            gradients_of = self.compiled(self._gradients)
            loss, totals, gradients = gradients_of(images, labels, num_global_examples)
            replica_id = tf.distribute.get_replica_context().replica_id_in_sync_group
            shard = Shard(images, labels, num_global_examples)
            gradients = self.observer.before_all_reduce(replica_id, shard, loss, gradients)
            sums = self.observer.after_all_reduce(replica_id, self._sum_over_replicas(gradients))
            self.optimizer.apply(sums, self.model.trainable_variables)
            return totals

        per_replica_totals = self._tf_strategy.run(replica_step, args=next(iterator))
        return StepTotals.sum(self._per_replica(per_replica_totals))

    def _gradients(
        self, images: tf.Tensor, labels: tf.Tensor, num_global_examples: tf.Tensor
    ) -> LossAndGradients:
        with tf.GradientTape() as tape:
            logits = self.model(images, training=True)
            loss, totals = shard_loss(
                logits, labels, num_global_examples, label_smoothing=self.label_smoothing
            )
        variables = self.model.trainable_variables
        gradients = differentiate(tape, loss, variables, loss_scale=self.loss_scale)
        return loss, totals, gradients

    def all_reduce(self, per_replica_tensors: PerReplicaTensors) -> PerReplicaTensors:
        return self.repeat_all_reduce(per_replica_tensors, 1)

    def repeat_all_reduce(
        self, per_replica_tensors: PerReplicaTensors, num_times: int
    ) -> PerReplicaTensors:
        if len(per_replica_tensors) == 1:
            return [list(self._all_reduce_loop(per_replica_tensors[0], tf.constant(num_times)))]
        values = [
            self._tf_strategy.experimental_distribute_values_from_function(
                lambda context, copies=copies: copies[
                    context.replica_id_in_sync_group - self.local_replica_ids.start
                ]
            )
            for copies in zip(*per_replica_tensors, strict=True)
        ]
        return self._per_replica(self._all_reduce_loop(values, tf.constant(num_times)))

    @tf.function
    def _all_reduce_loop(self, values: list[tf.Tensor], num_times: tf.Tensor) -> list[tf.Tensor]:
        def sum_over_replicas(tensors: list[tf.Tensor]) -> list[tf.Tensor]:
            # `tf.distribute` asks where each tensor is, which an argument of a graph does not know.
            return self._sum_over_replicas([tf.identity(tensor) for tensor in tensors])

        for _ in tf.range(num_times):
            values = self._tf_strategy.run(sum_over_replicas, args=(values,))
        return values

    def _sum_over_replicas(self, tensors: list[tf.Tensor]) -> list[tf.Tensor]:
        """Adds tensors over the replicas, in replica context, by TensorFlow's cross-device ops."""
        if self.no_sync:
            return tensors
        gradient_buckets, context = (
            self.gradient_buckets(tensors),
            tf.distribute.get_replica_context(),
        )
        buckets = context.all_reduce(tf.distribute.ReduceOp.SUM, gradient_buckets.pack(tensors))
        return gradient_buckets.unpack(buckets)

    def forward(self, iterator: BatchIterator) -> list[LogitsAndTotals]:
        def replica_forward(
            images: tf.Tensor, labels: tf.Tensor, num_global_examples: tf.Tensor
        ) -> LogitsAndTotals:
            logits = classify(self.model, images)
            _, totals = shard_loss(logits, labels, num_global_examples)
            return logits, totals

        return self._per_replica(self._tf_strategy.run(replica_forward, args=next(iterator)))

    def replica_variables(self) -> list[list[tf.Variable]]:
        variables = [v.value for v in self.model.variables + self.optimizer.variables]
        per_variable_copies = [self._tf_strategy.experimental_local_results(v) for v in variables]
        return [list(copies) for copies in zip(*per_variable_copies, strict=True)]

    def _per_replica(self, distributed: Any) -> list[Any]:
        """Turns a structure of per-replica values into a list with a structure for each replica."""
        leaves = [
            self._tf_strategy.experimental_local_results(v) for v in tf.nest.flatten(distributed)
        ]
        return [
            tf.nest.pack_sequence_as(distributed, replica_leaves)
            for replica_leaves in zip(*leaves, strict=True)
        ]
