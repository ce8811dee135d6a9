"""Implements sharded data parallelism (ZeRO, "fully sharded"). Read this file from top to bottom.

As in `manual.py`, each device trains on its own part of the global batch. `manual` stores R equal
copies of weights, gradients and optimizer state; here device r stores only part r of each variable,
a range of its elements. One training step

1. splits the global batch,
2. copies the parts of all weights to every device (all-gather),
3. computes the gradients of each shard on its device,
4. sums part r of all gradients on device r (reduce-scatter), and
5. updates part r of the weights on device r. The gathered weights are freed.

A reduce-scatter followed by an all-gather is an all-reduce: the bytes sent are the same as in
`manual`, and the weights are bitwise identical. `--shard` selects what is split:

    optimizer   ZeRO-1: the optimizer state
    gradients   ZeRO-2: the optimizer state and the summed gradients
    weights     ZeRO-3: the optimizer state, the summed gradients and the weights

With ZeRO-1 and ZeRO-2 every device stores all weights, which are gathered after the update.
`parts.py` has the part that a device stores, `collectives.py` the collectives.

Reference: S. Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter
Models", 2020.
"""

import functools

import tensorflow as tf

from strategies.base import BatchIterator, ModelFn, OptimizerFn
from strategies.collectives import PerReplicaTensors, all_gather, part_of, reduce_scatter, scatter
from strategies.copies import Variables, optimizer_shapes
from strategies.parts import DevicePart, update_parts, whole_variables
from strategies.replica import Replica, copies_of
from strategies.replica_list import ReplicaList
from strategies.step_totals import StepTotals
from strategies.sync_batch_norm import check_synchronizable
from strategies.tf_private import free_values

SHARD_CHOICES = "optimizer", "gradients", "weights"


class ShardedStrategy(ReplicaList):
    """Trains data-parallel replicas whose state is split over the devices."""

    name = "sharded"

    def prepare(self) -> None:
        shard = self.options.shard
        if shard not in SHARD_CHOICES:
            raise ValueError(f"--shard must be one of {', '.join(SHARD_CHOICES)}, got {shard}")
        self.splits_gradients, self.splits_weights = shard != "optimizer", shard == "weights"

    def default_all_reduce(self) -> str:
        return "direct" if self.num_replicas > 1 else "none"

    def build(self, model_fn: ModelFn, optimizer_fn: OptimizerFn) -> None:
        # With ZeRO-3 the model may not fit on one device; it is built in main memory.
        with tf.device("CPU:0" if self.splits_weights else self.devices[0]):
            self.model = model_fn()
        if self.syncs_batch_norm:
            check_synchronizable(self.model)
        weights = self.model.trainable_variables
        self._weight_shapes = {weight.path: tuple(weight.shape) for weight in weights}
        self._shapes = {f"model/{v.path}": tuple(v.shape) for v in self.model.variables}
        self._shapes |= optimizer_shapes(weights, optimizer_fn)
        self.replicas, self.parts = [], []
        for r, device in enumerate(self.devices):
            take = functools.partial(part_of, part_id=r, num_parts=self.num_devices)
            part = DevicePart.create(device, optimizer_fn, weights, take=take)
            with tf.device(device):
                self.replicas.append(self._new_replica(r, part, model_fn))
            self.parts.append(part)
        self.optimizer = self.parts[0].optimizer
        if self.splits_weights:
            free_values(self.model.variables)  # The parts have their own variables.

    def _new_replica(self, r: int, part: DevicePart, model_fn: ModelFn) -> Replica:
        """Creates a device's replica: a whole model, or with ZeRO-3 only its statistics."""
        if self.splits_weights:
            own = self.model.non_trainable_variables
            statistics = [copies_of(own) for _ in range(self.shards_per_replica)]
            return Replica(r, self.devices[r], self.model, part.optimizer, statistics)
        model = model_fn() if r > 0 else self.model
        for variable, first in zip(model.variables, self.model.variables, strict=True):
            variable.assign(first)
        return Replica(r, self.devices[r], model, part.optimizer, self.new_statistics(model))

    def train_step(self, iterator: BatchIterator) -> StepTotals:
        images, labels = next(iterator)
        shards = scatter((images, labels), self.devices, self.bounds(tf.size(labels)))  # 1. Split.
        replicas = self.callable_replicas()  # 2. All-gather.
        per_replica_gradients, per_replica_totals = self.gradients(  # 3. Gradients.
            replicas, shards, tf.size(labels)
        )
        per_device_sums = self._sum_in_parts(per_replica_gradients)  # 4. Reduce-scatter.
        self._update_parts(per_device_sums)  # 5. The update of its own part.
        # The observer gets whole sums. TensorFlow prunes this gather if the observer ignores them.
        whole_sums = all_gather(per_device_sums, self._weight_shapes.values(), self.devices)
        for copy_id in range(self.num_copies):
            with tf.device(self.devices[copy_id]):
                self.observer.on_update(copy_id, whole_sums[copy_id])
        return StepTotals.sum(per_replica_totals)

    def callable_replicas(self) -> list[Replica]:
        """Returns the replicas; with ZeRO-3, with gathered weights."""
        if not self.splits_weights:
            return self.replicas
        pairs = zip(self.replicas, self.gather_weights(), strict=True)
        return [replica._replace(gathered_weights=weights) for replica, weights in pairs]

    def gather_weights(self) -> PerReplicaTensors:
        """Returns the whole weights on every device."""
        parts = [list(part.read_weights().values()) for part in self.parts]
        return all_gather(parts, self._weight_shapes.values(), self.devices)

    def _sum_in_parts(self, per_replica_gradients: PerReplicaTensors) -> PerReplicaTensors:
        """Sums gradients over the replicas; item [r][v] of the result is part r of sum v."""
        if self.splits_gradients:
            return reduce_scatter(per_replica_gradients, self.devices)
        whole_sums = self.all_reduce(per_replica_gradients)  # ZeRO-1.
        return [part.take_all(sums) for part, sums in zip(self.parts, whole_sums, strict=True)]

    def _update_parts(self, per_device_sums: PerReplicaTensors) -> None:
        """Updates part r of the weights on device r."""
        if not self.splits_weights:  # Each device takes its part of the weights that it stores.
            for part, replica in zip(self.parts, self.replicas, strict=True):
                part.assign_weights(replica.weights)
        update_parts(self.parts, per_device_sums)
        if not self.splits_weights:
            for replica, weights in zip(self.replicas, self.gather_weights(), strict=True):
                replica.assign(weights)

    @property
    def part_shapes(self) -> list[dict[str, tuple[int, ...]]]:
        return [self._weight_shapes] * self.num_devices

    def copies(self) -> list[Variables]:
        per_device = [part.variables() for part in self.parts]
        in_parts = whole_variables(per_device[0], per_device, 0, self._shapes)
        copies: list[Variables] = []
        for replica in self.replicas[: self.num_copies]:
            whole = replica.shard_variables()[0]
            if not self.splits_weights:
                whole = {f"model/{v.path}": v.value for v in replica.model.variables}
            variables = in_parts | whole
            copies.append({name: variables[name] for name in self._shapes})
        return copies
