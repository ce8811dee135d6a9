"""Implements the same data parallelism with `tf.distribute.MirroredStrategy`.

The parts of `train_step` are numbered as in `manual.py`:

1. `distribute` makes an element of each shard; TensorFlow gives each replica the next one.
2. `local_gradients` (`base.py`) calls `forward_and_backward`, the same as that of `manual.py`.
3. `sum_over_replicas` (`tf_distribute.py`) does what
   `tf.distribute.get_replica_context().all_reduce("sum", gradients)` does, and is faster to trace.
4. `apply_gradients` (`base.py`) calls the optimizer.

`examples/data_parallel.py` does the same with public functions alone.
"""

from typing import ClassVar

import tensorflow as tf

from strategies.base import BatchIterator, ModelFn, OptimizerFn
from strategies.collectives import add_in_order
from strategies.step_totals import StepTotals
from strategies.tf_distribute import TfDistribute
from strategies.tf_private import disable_optimizer_all_reduce

Shard = tuple[tf.Tensor, ...]  # Images and labels.

# All-reduce algorithm → TensorFlow's implementation. `reduce_to_one` adds in the same order as
# `manual`, so that both are bitwise identical. `ring` is MirroredStrategy's default on CPUs.
CROSS_DEVICE_OPS = {
    "reduce_to_one": lambda: tf.distribute.ReductionToOneDevice(accumulation_fn=add_in_order),
    "nccl": tf.distribute.NcclAllReduce,
    "hierarchical": tf.distribute.HierarchicalCopyAllReduce,
    "ring": lambda: None,
}


class MirroredStrategy(TfDistribute):
    """Runs a custom training step in `strategy.run`; Keras' `fit` is not used."""

    name = "mirrored"
    device_kinds: ClassVar = {"nccl": "GPU", "ring": "CPU"}

    def create_tf_strategy(self) -> tf.distribute.Strategy:
        cross_device_ops = CROSS_DEVICE_OPS.get(self.algorithm, lambda: None)()
        return tf.distribute.MirroredStrategy(self.devices, cross_device_ops=cross_device_ops)

    def build(self, model_fn: ModelFn, optimizer_fn: OptimizerFn) -> None:
        with self.tf_strategy.scope():  # Creates equal weights on every device.
            self.template = self.new_replica(0, "", model_fn, optimizer_fn)
        self.model, self.optimizer = self.template.model, self.template.optimizer
        disable_optimizer_all_reduce(self.optimizer)  # Keras would sum the sums once more.

    @tf.autograph.experimental.do_not_convert  # The functions below are graphs as they stand.
    def distribute(self, dataset: tf.data.Dataset) -> BatchIterator:
        """Distributes the shards of each global batch to the replicas in order.

        `experimental_distribute_dataset` rounds shard sizes up, 4 over 3 as 2, 2, 0, which can
        leave a replica without examples. Here each shard is a dataset element, in replica order,
        together with the size of its global batch.
        """

        def to_shards(*batch: tf.Tensor) -> tf.data.Dataset:
            num_examples = tf.shape(batch[0])[0]

            def to_shard(replica_id: tf.Tensor) -> tuple[Shard, tf.Tensor]:
                start, end = self.replica_bounds(num_examples, replica_id)
                return tuple(tensor[start:end] for tensor in batch), num_examples

            return self.local_replica_ids().map(to_shard)

        return self.endless_iterator(dataset.flat_map(to_shards))

    def train_step(self, iterator: BatchIterator) -> StepTotals:
        def replica_step(shard: Shard, num_examples: tf.Tensor) -> StepTotals:
            replica = self.current_replica()  # 1. `distribute` has split the batch.
            gradients, totals = self.local_gradients(replica, shard, num_examples)  # 2. Gradients.
            sums = self.sum_over_replicas(gradients)  # 3. All-reduce (sum).
            self.apply_gradients(replica, sums)  # 4. The same update everywhere.
            return totals

        per_replica_totals = self.tf_strategy.run(replica_step, args=next(iterator))
        return StepTotals.sum(self.per_replica(per_replica_totals))
