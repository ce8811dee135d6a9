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

Reference: S. Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter
Models", 2020.
"""

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from strategies import base
from strategies.base import PerReplicaTensors
from strategies.copies import State, Variables, optimizer_shapes
from strategies.flat_parts import (
    Part,
    all_gather_all,
    part_of,
    reduce_scatter_all,
    whole_variable,
)
from strategies.loss_scale import share_overflow
from strategies.manual import (
    all_reduce,
    classify_on_each_device,
    gradients_on_each_device,
    split_batch,
)
from strategies.replica import Replica
from strategies.shard_step import copies_of
from strategies.sync_batch_norm import check_synchronizable
from strategies.tf_private import free_values

SHARD_CHOICES = "optimizer", "gradients", "weights"


class ShardedStrategy(base.Strategy):
    """Trains data-parallel replicas whose state is split over the devices."""

    name = "sharded"

    def __init__(self, devices: Sequence[str], *, shard: str = "weights", **options: Any):
        super().__init__(devices, **options)
        if shard not in SHARD_CHOICES:
            raise ValueError(f"--shard must be one of {', '.join(SHARD_CHOICES)}, got {shard}")
        self.splits_gradients, self.splits_weights = shard != "optimizer", shard == "weights"
        self.num_copies = 1 if self.splits_weights else self.num_replicas

    def default_all_reduce(self) -> str:
        return "direct" if self.num_replicas > 1 else "none"  # In two separate steps.

    @property
    def gather_groups(self) -> list[list[str]]:
        return [self.devices] if self.syncs_batch_norm else []

    def build(self, model_fn: base.ModelFn, optimizer_fn: base.OptimizerFn) -> None:
        # With ZeRO-3 the model may not fit on one device; it is built in main memory.
        with tf.device("CPU:0" if self.splits_weights else self.devices[0]):
            self.model = model_fn()
        with tf.device("CPU:0"):
            self._optimizer_shapes = optimizer_shapes(self.model.trainable_variables, optimizer_fn)
        self._shapes = [tf.TensorShape(v.shape) for v in self.model.trainable_variables]
        self.replicas, self.parts = [], []
        for r, device in enumerate(self.devices):
            whole = self.model.trainable_variables
            self.parts.append(Part.create(whole, r, self.devices, optimizer_fn))
            with tf.device(device):
                self.replicas.append(self._new_replica(r, device, model_fn))
        if self.syncs_batch_norm:
            check_synchronizable(self.model)
        self.optimizer = self.parts[0].optimizer
        if self.splits_weights:
            free_values(self.model.variables)  # The parts have their own variables.

    def train_step(self, iterator: base.BatchIterator) -> base.StepTotals:
        batch = next(iterator)
        shards = split_batch(batch, self.devices, self.replica_weights)  # 1. A shard for each.
        replicas = self._with_weights()  # 2. All-gather.
        per_replica_gradients, per_replica_totals = gradients_on_each_device(  # 3. Gradients.
            self, replicas, shards, batch
        )
        per_device_sums = self._sum_in_parts(per_replica_gradients)  # 4. Reduce-scatter.
        applied = per_device_sums
        if self.loss_scale is not None:
            applied = share_overflow(per_device_sums, self.devices)
        for part, sums in zip(self.parts, applied, strict=True):
            with tf.device(part.device):
                part.optimizer.apply(sums, part.weights)  # 5. The update of its own part.
        if not self.splits_weights:
            self._assign_weights()
        # The observer gets whole sums. TensorFlow prunes this gather if the observer ignores them.
        whole_sums = all_gather_all(per_device_sums, self._shapes, self.devices)
        for copy_id in range(self.num_copies):
            with tf.device(self.devices[copy_id]):
                self.observer.on_update(copy_id, whole_sums[copy_id])
        return base.StepTotals.sum(per_replica_totals)

    def _with_weights(self) -> Sequence[Replica]:
        """Returns the replicas; with ZeRO-3, with gathered weights."""
        if not self.splits_weights:
            return self.replicas
        gathered = self._gathered_weights()
        return [r._replace(weights=w) for r, w in zip(self.replicas, gathered, strict=True)]

    def _gathered_weights(self) -> PerReplicaTensors:
        """Returns the whole weights on every device."""
        per_device_parts = []
        for part in self.parts:
            with tf.device(part.device):  # Read once, so that every device gets the same values.
                per_device_parts.append([tf.identity(weight.value) for weight in part.weights])
        paths = [variable.path for variable in self.model.trainable_variables]
        gathered = all_gather_all(per_device_parts, self._shapes, self.devices)
        for r, device in enumerate(self.devices):
            with tf.device(device):
                named = dict(zip(paths, gathered[r], strict=True))
                gathered[r] = list(self.observer.on_weights(r, named).values())
        return gathered

    def _sum_in_parts(self, per_replica_gradients: PerReplicaTensors) -> PerReplicaTensors:
        """Sums gradients over the replicas; item [r][v] of the result is part r of sum v."""
        if self.splits_gradients:
            return reduce_scatter_all(per_replica_gradients, self.devices)
        # ZeRO-1: every device has the whole sums and updates its part.
        per_device_sums = all_reduce(per_replica_gradients, self.devices)
        for r, device in enumerate(self.devices):
            with tf.device(device):
                per_device_sums[r] = [
                    part_of(total, r, self.num_devices) for total in per_device_sums[r]
                ]
        return per_device_sums

    def _assign_weights(self) -> None:
        """Gathers the updated weights into the model of each device."""
        for replica, weights in zip(self.replicas, self._gathered_weights(), strict=True):
            with tf.device(replica.device):
                for variable, new in zip(replica.model.trainable_variables, weights, strict=True):
                    variable.assign(new)

    def _new_replica(self, r: int, device: str, model_fn: base.ModelFn) -> Replica:
        """Creates a device's replica: a whole model, or with ZeRO-3 only its statistics."""
        optimizer = self.parts[r].optimizer
        if self.splits_weights:
            own = self.model.non_trainable_variables
            statistics = [copies_of(own) for _ in range(self.shards_per_replica)]
            return Replica(r, device, self.model, optimizer, statistics)
        model = model_fn() if r else self.model
        for variable, first in zip(model.variables, self.model.variables, strict=True):
            variable.assign(first)
        return Replica(r, device, model, optimizer, self.new_statistics(model))

    def all_reduce(self, per_replica_tensors: PerReplicaTensors) -> PerReplicaTensors:
        shapes = [tensor.shape for tensor in per_replica_tensors[0]]
        parts = reduce_scatter_all(per_replica_tensors, self.devices)
        return all_gather_all(parts, shapes, self.devices)

    def forward(
        self, iterator: base.BatchIterator, statistics: base.Statistics
    ) -> list[base.LogitsAndTotals]:
        return classify_on_each_device(self, self._with_weights(), next(iterator), statistics)

    def copies(self) -> list[Variables]:
        slots = zip(*(part.optimizer.variables for part in self.parts), strict=True)
        optimizer = {
            name: whole_variable(parts, shape)
            for (name, shape), parts in zip(self._optimizer_shapes.items(), slots, strict=True)
        }
        if not self.splits_weights:
            return [
                {f"model/{v.path}": v.value for v in replica.model.variables} | optimizer
                for replica in self.replicas
            ]
        weights = zip(*(part.weights for part in self.parts), strict=True)
        model: dict[str, Any] = {
            v.path: whole_variable(parts, v.shape)
            for v, parts in zip(self.model.trainable_variables, weights, strict=True)
        }
        own = zip(self.model.non_trainable_variables, self.replicas[0].statistics[0], strict=True)
        model |= {v.path: variable.value for v, variable in own}
        return [{f"model/{v.path}": model[v.path] for v in self.model.variables} | optimizer]

    def load_state(self, state: State) -> None:
        super().load_state(state)
        if not self.splits_weights:  # The optimizers update the parts, not the models' variables.
            for r, (part, replica) in enumerate(zip(self.parts, self.replicas, strict=True)):
                weights = replica.model.trainable_variables
                for own, whole in zip(part.weights, weights, strict=True):
                    own.assign(part_of(tf.convert_to_tensor(whole.value), r, self.num_devices))
