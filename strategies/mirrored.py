"""The same data parallelism with `tf.distribute.MirroredStrategy`, line by line beside `manual.py`.

1. `distribute` makes an element of each shard; TensorFlow gives each replica the next one.
2. to 4. are the function `replica_step`, which `strategy.run` calls for each replica on its device.

`examples/data_parallel.py` has both in one file.
"""

from collections.abc import Iterator
from typing import Any

import keras
import tensorflow as tf

from strategies.base import (
    BatchIterator,
    ModelFn,
    OptimizerFn,
    Replica,
    Shard,
    Statistics,
    StepTotals,
    Strategy,
    classify,
    sum_of_losses,
)
from strategies.collectives import PerReplicaTensors, add_in_order
from strategies.state import Variables
from strategies.tf_private import disable_optimizer_all_reduce

# `reduce_to_one` adds in the order of `manual`: both are bitwise identical. `ring` is TensorFlow's
# default on CPUs.
CROSS_DEVICE_OPS = {
    "reduce_to_one": lambda: tf.distribute.ReductionToOneDevice(accumulation_fn=add_in_order),
    "nccl": tf.distribute.NcclAllReduce,
    "hierarchical": tf.distribute.HierarchicalCopyAllReduce,
    "ring": lambda: None,
}
DEVICE_KINDS = {"nccl": "GPU", "ring": "CPU"}  # Algorithm → the only devices that it is for.


class MirroredStrategy(Strategy):
    """Runs a custom training step in `strategy.run`; Keras' `fit` is not used."""

    name = "mirrored"

    def prepare(self) -> None:
        """Checks the devices, and creates TensorFlow's strategy on them."""
        kind = DEVICE_KINDS.get(self.algorithm, "")
        if self.name == "mirrored" and not all(kind in device for device in self.devices):
            raise ValueError(
                f"--all_reduce={self.algorithm} with strategy {self.name} needs {kind}s, got"
                f" {self.devices}"
            )
        self.tf_strategy = self.create_tf_strategy()

    def default_all_reduce(self) -> str:
        """Returns "nccl" on several GPUs."""
        return "nccl" if "GPU" in self.devices[0] and self.num_replicas > 1 else "reduce_to_one"

    def create_tf_strategy(self) -> tf.distribute.Strategy:
        """Creates TensorFlow's strategy on the devices."""
        cross_device_ops = CROSS_DEVICE_OPS[self.algorithm]()
        return tf.distribute.MirroredStrategy(self.devices, cross_device_ops=cross_device_ops)

    def build(self, model_fn: ModelFn, optimizer_fn: OptimizerFn) -> None:
        """Builds one model, whose variables have a copy with equal values on every device."""
        with self.tf_strategy.scope():
            self.replicas = [Replica.build(model_fn, optimizer_fn)]
        disable_optimizer_all_reduce(self.optimizer)  # Keras would sum the sums once more.
        for layer in batch_norm_layers(self.model) if self.syncs_batch_norm else ():
            layer.synchronized = True

    @tf.autograph.experimental.do_not_convert  # The functions below are graphs as they stand.
    def distribute(self, dataset: tf.data.Dataset) -> BatchIterator:
        """Makes each shard of a global batch an element; the replicas take them in order.

        `experimental_distribute_dataset` rounds shard sizes up: 4 over 3 would be 2, 2, 0.
        """
        ids = self.local_shard_ids

        def to_shards(images: tf.Tensor, labels: tf.Tensor) -> tf.data.Dataset:
            num_examples = tf.shape(images)[0]

            def to_shard(replica_id: tf.Tensor) -> Shard:
                start, end = self.shard_bounds(num_examples, replica_id)
                return Shard(images[start:end], labels[start:end], num_examples)

            return tf.data.Dataset.range(ids.start, ids.stop, output_type=tf.int32).map(to_shard)

        # With an infinite cardinality, a step does not check for the end of the dataset.
        endless = tf.data.experimental.assert_cardinality(tf.data.INFINITE_CARDINALITY)
        shards = dataset.flat_map(to_shards).apply(endless)
        return iter(self.tf_strategy.distribute_datasets_from_function(lambda _: shards))

    def train_step(self, iterator: BatchIterator) -> StepTotals:
        """Trains on one global batch."""
        (replica,) = self.replicas

        def replica_step(shard: Shard) -> StepTotals:  # 1. `distribute` has split the batch.
            context = tf.distribute.get_replica_context()
            replica_id = context.replica_id_in_sync_group
            with tf.GradientTape() as tape:  # 2. Gradients of the replica's shard.
                logits = replica.model(shard.images, training=True)
                loss_sum = sum_of_losses(logits, shard.labels, self.label_smoothing)
                loss = loss_sum / tf.cast(shard.num_global_examples, tf.float32)
            gradients = tape.gradient(loss, replica.weights)
            gradients = self.observer.on_shard(replica_id, shard, logits, loss, gradients)
            sums = context.all_reduce(tf.distribute.ReduceOp.SUM, gradients)  # 3. All-reduce (sum).
            replica.optimizer.apply(sums, replica.model.trainable_variables)  # 4. The same update.
            self.observer.on_update(replica_id, sums)
            return StepTotals.of(logits, shard.labels)

        per_replica_totals = self.tf_strategy.run(replica_step, args=(next(iterator),))
        return StepTotals.sum(self.per_replica(per_replica_totals))

    def evaluate_step(self, iterator: BatchIterator, statistics: Statistics) -> StepTotals:
        """Evaluates the shards of one global batch, each on its device."""

        def evaluate_shard(shard: Shard) -> StepTotals:
            return classify(self.model, shard, statistics)

        totals = self.tf_strategy.run(evaluate_shard, args=(next(iterator),))
        return StepTotals.sum(self.per_replica(totals))

    @tf.function(autograph=False)
    def all_reduce(self, per_replica_tensors: PerReplicaTensors) -> PerReplicaTensors:
        """Sums tensors with the all-reduce of `train_step`."""
        first = self.local_shard_ids.start
        distribute = self.tf_strategy.experimental_distribute_values_from_function
        values = [
            distribute(lambda context, c=copies: c[context.replica_id_in_sync_group - first])
            for copies in zip(*per_replica_tensors, strict=True)
        ]

        def sum_tensors(tensors: list[tf.Tensor]) -> list[tf.Tensor]:
            # `identity` places the tensors on the replica's device, which NCCL requires.
            own = [tf.identity(tensor) for tensor in tensors]
            context = tf.distribute.get_replica_context()
            return context.all_reduce(tf.distribute.ReduceOp.SUM, own)

        return self.per_replica(self.tf_strategy.run(sum_tensors, args=(values,)))

    def copies(self) -> list[Variables]:
        """Returns name → variable for each replica of this worker."""
        return self.per_replica(super().copies()[0])

    def shard_variables(self) -> list[Variables]:
        """Returns name → moving statistic for each replica of this worker."""
        return self.per_replica(super().shard_variables()[0])

    def per_replica(self, distributed: Any) -> list[Any]:
        """Converts a structure of per-replica values to a list with one structure per replica."""
        local, leaves = self.tf_strategy.experimental_local_results, tf.nest.flatten(distributed)
        return [
            tf.nest.pack_sequence_as(distributed, [local(leaf)[r] for leaf in leaves])
            for r in range(len(self.local_devices))
        ]


def batch_norm_layers(model: keras.Model) -> Iterator[keras.layers.BatchNormalization]:
    """Yields the BatchNorm layers of a model and of the models in it."""
    for layer in model.layers:
        if isinstance(layer, keras.layers.BatchNormalization):
            yield layer
        elif isinstance(layer, keras.Model):
            yield from batch_norm_layers(layer)
