"""Data parallelism by hand. Read this file from top to bottom: it is the whole training step.

Every device holds a *replica*, a copy of the weights; all replicas start from equal weights. One
step

1. splits the global batch into one shard for each replica,
2. computes on each device the gradients of (sum of the losses of its shard) / (examples of the
   global batch),
3. sums the gradients over the replicas and copies the sums to each replica (an all-reduce), and
4. applies the same update on each device.

The weights of all replicas therefore stay bitwise identical, although no weights are sent after the
start. `train_steps` of the base class calls `train_step` in a `tf.function`: the loops over devices
run once, while it traces the step into one graph, in which all devices work in parallel. The two
lines with `self.observer` do nothing in a plain training: `verify` records there, and `--inject`
changes gradients there.

"d2l" marks the names of "Dive into Deep Learning", section "Training on Multiple GPUs".
"""

from collections.abc import Sequence

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
from strategies.collectives import PerReplicaTensors, add_in_order, ring, shard_bounds


def split_batch(batch: Sequence[tf.Tensor], devices: Sequence[str]) -> list[Shard]:
    """Copies a shard of the batch to each device: 100 rows on 3 devices are 34, 33 and 33.

    d2l: `split_batch`.

    Args:
        batch: images and labels, each with one row for each example.
        devices: R device names.

    Returns:
        R shards, each on its device.
    """
    num_examples, shards = tf.shape(batch[0])[0], []
    for replica_id, device in enumerate(devices):
        start, end = shard_bounds(num_examples, len(devices), replica_id)
        rows = [tensor[start:end] for tensor in batch]
        with tf.device(device):
            images, labels = (tf.identity(tensor) for tensor in rows)
        shards.append(Shard(images, labels, num_examples))
    return shards


def all_reduce(per_replica_tensors: PerReplicaTensors, devices: Sequence[str]) -> PerReplicaTensors:
    """Sums tensors over the replicas and copies the sums to each replica.

    d2l: `allreduce`. With S bytes per replica, the first device receives (R - 1) * S bytes and
    sends as many.

    Args:
        per_replica_tensors: R lists of V tensors; item [r][v] is on device r.
        devices: R device names.

    Returns:
        R lists of V tensors, placed like the input; item [r][v] is bitwise identical for every r.
    """
    with tf.device(devices[0]):  # Reduce: ((replica 0 + replica 1) + replica 2) + ...
        sums = [add_in_order(terms) for terms in zip(*per_replica_tensors, strict=True)]
    per_replica_sums = []
    for device in devices:  # Broadcast.
        with tf.device(device):
            per_replica_sums.append([tf.identity(total) for total in sums])
    return per_replica_sums


ALL_REDUCE_FUNCTIONS = {"reduce_to_one": all_reduce, "ring": ring}  # --all_reduce → function.


class ManualStrategy(Strategy):
    """Trains one replica on each device, with an explicit all-reduce."""

    name = "manual"

    def build(self, model_fn: ModelFn, optimizer_fn: OptimizerFn) -> None:
        """Builds a replica on each device, all with the weights of the first.

        d2l: `get_params`.
        """
        self.replicas = []
        for device in self.devices:
            with tf.device(device):
                self.replicas.append(Replica.build(model_fn, optimizer_fn))
        first, *others = self.replicas
        for replica in others:
            for own, variable in zip(replica.model.variables, first.model.variables, strict=True):
                own.assign(variable)

    def train_step(self, iterator: BatchIterator) -> StepTotals:
        """Trains on one global batch; d2l: `train_batch`."""
        shards = split_batch(next(iterator), self.devices)  # 1. A shard for each replica.
        per_replica_gradients, totals = [], []
        for replica_id, (replica, shard) in enumerate(zip(self.replicas, shards, strict=True)):
            with tf.device(self.devices[replica_id]):  # 2. Gradients of each shard, on its device.
                with tf.GradientTape() as tape:
                    logits = replica.model(shard.images, training=True)
                    loss_sum = sum_of_losses(logits, shard.labels, self.label_smoothing)
                    loss = loss_sum / tf.cast(shard.num_global_examples, tf.float32)
                gradients = tape.gradient(loss, replica.weights)
                gradients = self.observer.on_shard(replica_id, shard, logits, loss, gradients)
                per_replica_gradients.append(gradients)
                totals.append(StepTotals.of(logits, shard.labels))
        per_replica_sums = self.all_reduce(per_replica_gradients)  # 3. Sum: by default as above.
        for replica_id, (replica, sums) in enumerate(
            zip(self.replicas, per_replica_sums, strict=True)
        ):
            with tf.device(self.devices[replica_id]):  # 4. The same update everywhere.
                replica.optimizer.apply(sums, replica.model.trainable_variables)
                self.observer.on_update(replica_id, sums)
        return StepTotals.sum(totals)

    def all_reduce(self, per_replica_tensors: PerReplicaTensors) -> PerReplicaTensors:
        """Calls the function of `--all_reduce`, for a step and for the check before training."""
        return ALL_REDUCE_FUNCTIONS[self.algorithm](per_replica_tensors, self.devices)

    def evaluate_step(self, iterator: BatchIterator, statistics: Statistics) -> StepTotals:
        """Evaluates the shards of one global batch, each on its device."""
        shards, totals = split_batch(next(iterator), self.devices), []
        for device, replica, shard in zip(self.devices, self.replicas, shards, strict=True):
            with tf.device(device):
                totals.append(classify(replica.model, shard, statistics))
        return StepTotals.sum(totals)
