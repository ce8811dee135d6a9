"""Implements data parallelism by hand. Read this file from top to bottom.

Every device holds a *replica*, a copy of the weights; all replicas start from equal weights. One
training step

1. splits the global batch into one shard per replica,
2. computes the gradients of each shard on its device,
3. sums the gradients over the replicas and copies the sums to each replica (an all-reduce), and
4. applies the same update on each device.

The weights of all replicas therefore stay bitwise identical, although no weights are sent after the
start.

The loops over the replicas run once, while `tf.function` traces the step (`compiled_steps.py`) into
one graph, in which all devices work in parallel. `shard_step.py` defines `local_gradients` (forward
pass, loss, backward pass) and `apply_gradients` (update).

"d2l" marks the names that "Dive into Deep Learning" uses in "Training on Multiple GPUs".
"""

from collections.abc import Sequence

import tensorflow as tf

from strategies import base, collectives
from strategies.base import PerReplicaTensors
from strategies.copies import Variables
from strategies.replica import Replica
from strategies.sync_batch_norm import check_synchronizable, synchronized_gradients


def split_batch(
    batch: Sequence[tf.Tensor], devices: Sequence[str], weights: Sequence[int] = ()
) -> list[tuple[tf.Tensor, ...]]:
    """Splits a global batch into one shard per device, in order (d2l: `split_batch`).

    Args:
        batch: tensors `(n, ...)` with the same n, for example images and labels.
        devices: R device names.
        weights: relative sizes of the shards; empty for equal shards, whose sizes differ by at
            most one example.

    Returns:
        R tuples; item [r] is on device r and holds rows `weighted_bounds(n, weights, r)`.
    """
    num_examples, shards = tf.shape(batch[0])[0], []
    weights = weights or [1] * len(devices)
    for replica_id, device in enumerate(devices):
        start, end = collectives.weighted_bounds(num_examples, weights, replica_id)
        rows = [tensor[start:end] for tensor in batch]
        with tf.device(device):
            shards.append(tuple(tf.identity(tensor) for tensor in rows))
    return shards


def gradients_on_each_device(
    strategy: base.Strategy,
    replicas: Sequence[Replica],
    shards: Sequence[Sequence[tf.Tensor]],
    batch: Sequence[tf.Tensor],
) -> tuple[PerReplicaTensors, list[base.StepTotals]]:
    """Computes for each shard the gradients of sum(losses of the shard) / size of the global batch.

    Args:
        strategy: defines the loss.
        replicas: R replicas, each on its device.
        shards: R tuples of images and labels, each on the device of its replica.
        batch: images and labels of the global batch.

    Returns:
        R lists with one gradient per weight, and R totals.
    """
    num_global_examples = tf.shape(batch[0])[0]
    if strategy.syncs_batch_norm:  # All replicas call each layer together.
        return synchronized_gradients(strategy, replicas, shards, num_global_examples)
    per_replica_gradients, per_replica_totals = [], []
    for replica, shard in zip(replicas, shards, strict=True):
        with tf.device(replica.device):
            gradients, totals = strategy.local_gradients(replica, shard, num_global_examples)
        per_replica_gradients.append(gradients)
        per_replica_totals.append(totals)
    return per_replica_gradients, per_replica_totals


def classify_on_each_device(
    strategy: base.Strategy,
    replicas: Sequence[Replica],
    batch: Sequence[tf.Tensor],
    statistics: base.Statistics,
) -> list[base.LogitsAndTotals]:
    """Computes the logits of each shard on its device; see `base.Strategy.forward`."""
    images, labels = batch
    shards = split_batch((images, labels), strategy.devices, strategy.replica_weights)
    results = []
    for replica, shard in zip(replicas, shards, strict=True):
        with tf.device(replica.device):
            results.append(strategy.classify(replica, shard, tf.size(labels), statistics))
    return results


def all_reduce(per_replica_tensors: PerReplicaTensors, devices: Sequence[str]) -> PerReplicaTensors:
    """Sums tensors over the replicas and copies the sums to each replica (d2l: `allreduce`).

    With S bytes per replica, the first device receives (R - 1) * S bytes and sends as many.

    Args:
        per_replica_tensors: R lists of V tensors; item [r][v] is on device r.
        devices: R device names.

    Returns:
        R lists of V tensors, placed like the input; item [r][v] is bitwise identical for every r.

    Reference: the algorithm of `tf.distribute.ReductionToOneDevice`.
    """
    with tf.device(devices[0]):  # Reduce: ((replica 0 + replica 1) + replica 2) + ...
        sums = [
            collectives.add_in_order(copies) for copies in zip(*per_replica_tensors, strict=True)
        ]
    per_replica_sums = []
    for device in devices:  # Broadcast.
        with tf.device(device):
            per_replica_sums.append([tf.identity(total) for total in sums])
    return per_replica_sums


class ManualStrategy(base.Strategy):
    """Trains data-parallel replicas with explicit gradient tapes and an explicit all-reduce."""

    name = "manual"

    @property
    def gather_groups(self) -> list[list[str]]:
        return [self.devices] if self.syncs_batch_norm else []

    def build(self, model_fn: base.ModelFn, optimizer_fn: base.OptimizerFn) -> None:
        self.replicas = []
        for replica_id, device in enumerate(self.devices):
            with tf.device(device):
                model, optimizer = self.build_replica(model_fn, optimizer_fn)
                statistics = self.new_statistics(model)
            self.replicas.append(Replica(replica_id, device, model, optimizer, statistics))
        self.model, self.optimizer = self.replicas[0].model, self.replicas[0].optimizer
        if self.syncs_batch_norm:
            check_synchronizable(self.model)
        for replica in self.replicas[1:]:  # Equal weights everywhere (d2l: `get_params`).
            for variable, first in zip(replica.model.variables, self.model.variables, strict=True):
                variable.assign(first)

    def train_step(self, iterator: base.BatchIterator) -> base.StepTotals:  # d2l: train_batch
        batch = next(iterator)
        shards = split_batch(batch, self.devices, self.replica_weights)  # 1. A shard for each.
        per_replica_gradients, per_replica_totals = gradients_on_each_device(  # 2. Gradients.
            self, self.replicas, shards, batch
        )
        per_replica_sums = self.all_reduce(per_replica_gradients)  # 3. All-reduce (sum).
        for replica, sums in zip(self.replicas, per_replica_sums, strict=True):
            with tf.device(replica.device):
                self.apply_gradients(replica, sums)  # 4. The same update everywhere.
        return base.StepTotals.sum(per_replica_totals)

    def all_reduce(self, per_replica_tensors: PerReplicaTensors) -> PerReplicaTensors:
        if self.algorithm == "none":
            return per_replica_tensors
        return collectives.in_buckets(
            collectives.ALL_REDUCE_FUNCTIONS.get(self.algorithm, all_reduce),
            per_replica_tensors,
            self.devices,
            self.gradient_buckets(per_replica_tensors[0]),
        )

    def forward(
        self, iterator: base.BatchIterator, statistics: base.Statistics
    ) -> list[base.LogitsAndTotals]:  # d2l: evaluate_accuracy_gpu
        return classify_on_each_device(self, self.replicas, next(iterator), statistics)

    def copies(self) -> list[Variables]:
        return [self.named_variables(replica.model, replica.optimizer) for replica in self.replicas]
