"""Implements data parallelism by hand. Read this file from top to bottom.

Every device holds a *replica*, a copy of the weights; all replicas start from equal weights. One
training step

1. splits the global batch into one shard per replica,
2. computes on each device the gradients of (sum of the losses of its shard) / (examples of the
   global batch),
3. sums the gradients over the replicas and copies the sums to each replica (an all-reduce), and
4. applies the same update on each device.

The trainable weights of all replicas therefore stay bitwise identical, although no weights are sent
after the start. The loops over the replicas run once, while `tf.function` traces the step into one
graph, in which all devices work in parallel.

`train_step`, at the end, calls four methods that it inherits. With default options, they do this:

* `bounds`: start and end of each shard; 100 rows on 3 devices are 34, 33 and 33,
* `gradients`: calls `forward_and_backward`, below, for each shard on the device of its replica,
* `all_reduce`: calls the function `all_reduce`, below, with the gradients and the devices,
* `apply_gradients`: `replica.optimizer.apply(sums, weights)`.

The rest of them is options (micro-batches, synchronised BatchNorm, other algorithms) and hooks
with which `verify` records a step: `replica_list.py` and `base.py`.

"d2l" marks the names that "Dive into Deep Learning" uses in "Training on Multiple GPUs".
"""

from collections.abc import Sequence
from typing import ClassVar

import tensorflow as tf

from strategies.base import BatchIterator, Bounds, ModelFn, OptimizerFn
from strategies.collectives import ALL_REDUCE_FUNCTIONS, PerReplicaTensors, add_in_order
from strategies.loss import sum_of_losses, unscaled
from strategies.replica import Replica
from strategies.replica_list import ReplicaList
from strategies.step_totals import StepTotals

Shard = tuple[tf.Tensor, ...]  # Images and labels.


def split_batch(
    batch: Sequence[tf.Tensor], devices: Sequence[str], bounds: Sequence[Bounds]
) -> list[Shard]:
    """Copies rows start to end of a global batch to each device (d2l: `split_batch`)."""
    shards = []
    for device, (start, end) in zip(devices, bounds, strict=True):
        rows = [tensor[start:end] for tensor in batch]
        with tf.device(device):
            shards.append(tuple(tf.identity(tensor) for tensor in rows))
    return shards


def all_reduce(per_replica_tensors: PerReplicaTensors, devices: Sequence[str]) -> PerReplicaTensors:
    """Sums tensors over the replicas and copies the sums to each replica (d2l: `allreduce`).

    With S bytes per replica, the first device receives (R - 1) * S bytes and sends as many.

    Args:
        per_replica_tensors: R lists of V tensors; item [r][v] is on device r.
        devices: R device names.

    Returns:
        R lists of V tensors, placed like the input; item [r][v] is bitwise identical for every r.
    """
    with tf.device(devices[0]):  # Reduce: ((replica 0 + replica 1) + replica 2) + ...
        sums = [add_in_order(copies) for copies in zip(*per_replica_tensors, strict=True)]
    per_replica_sums = []
    for device in devices:  # Broadcast.
        with tf.device(device):
            per_replica_sums.append([tf.identity(total) for total in sums])
    return per_replica_sums


class ManualStrategy(ReplicaList):
    """Trains data-parallel replicas with an explicit all-reduce."""

    name = "manual"
    # --all_reduce → what `self.all_reduce` calls; by default, the function above.
    all_reduce_functions: ClassVar = {"reduce_to_one": all_reduce, **ALL_REDUCE_FUNCTIONS}

    def build(self, model_fn: ModelFn, optimizer_fn: OptimizerFn) -> None:
        self.replicas = []
        for replica_id, device in enumerate(self.devices):
            with tf.device(device):
                self.replicas.append(self.new_replica(replica_id, device, model_fn, optimizer_fn))
        first, *others = self.replicas
        self.model, self.optimizer = first.model, first.optimizer
        for replica in others:  # Equal weights everywhere (d2l: `get_params`).
            for own, variable in zip(replica.model.variables, first.model.variables, strict=True):
                own.assign(variable)

    def forward_and_backward(
        self,
        replica: Replica,
        images: tf.Tensor,
        labels: tf.Tensor,
        num_global_examples: tf.Tensor,
        loss_scale: tf.Tensor | None,
    ) -> tuple[tf.Tensor, tf.Tensor, list[tf.Tensor]]:
        """Computes the gradients of (sum of a shard's losses) / (examples of the global batch).

        Their sum over the shards is the gradient of the mean loss of the global batch, whatever the
        sizes of the shards are. (d2l divides by the size of the batch in `sgd`.) `loss_scale` has
        nothing to do with several devices: it is None but for float16, where the backward pass
        starts from a large number in place of 1, by which `unscaled` divides.
        """
        with tf.GradientTape() as tape:
            logits = replica.model(images, training=True)
            loss_sum = sum_of_losses(logits, labels, self.label_smoothing)
            loss = loss_sum / tf.cast(num_global_examples, tf.float32)
        gradients = tape.gradient(loss, replica.weights, output_gradients=loss_scale)
        return logits, loss, unscaled(gradients, loss_scale)

    def train_step(self, iterator: BatchIterator) -> StepTotals:  # d2l: train_batch
        images, labels = next(iterator)
        bounds = self.bounds(tf.size(labels))
        shards = split_batch((images, labels), self.devices, bounds)  # 1. A shard for each.
        per_replica_gradients, per_replica_totals = self.gradients(  # 2. Gradients.
            self.replicas, shards, tf.size(labels)
        )
        per_replica_sums = self.all_reduce(per_replica_gradients)  # 3. All-reduce (sum).
        for replica, sums in zip(self.replicas, per_replica_sums, strict=True):
            with tf.device(replica.device):
                self.apply_gradients(replica, sums)  # 4. The same update everywhere.
        return StepTotals.sum(per_replica_totals)
