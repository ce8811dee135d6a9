"""Data parallelism with sharded state (ZeRO, "fully sharded"), to be read from top to bottom.

As in `manual.py`, each device trains on its own part of the global batch. But where `manual` keeps
R equal copies of weights, gradients and optimizer state, device r keeps part r of each variable: a
range of its elements. One training step 1. splits the global batch, 2. copies the parts of all
weights to every device (all-gather), 3. computes there the gradients of its own shard, 4. adds part
r of all gradients on device r (reduce-scatter), and 5. updates part r of the weights there. What
was gathered is dropped.

A reduce-scatter and an all-gather are an all-reduce: what travels, and every bit of the weights, is
the same as in `manual`. `--shard` says what is kept in parts:

    optimizer   ZeRO-1: the optimizer state
    gradients   ZeRO-2: that and the summed gradients
    weights     ZeRO-3: that and the weights

With the first two every device has all weights, which are gathered after the update.

Reference: S. Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter
Models", 2020.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from strategies import base, collectives
from strategies.base import PerReplicaTensors
from strategies.copies import State, Variables, optimizer_shapes
from strategies.manual import all_reduce, gradients_on_each_device, split_batch
from strategies.shard_step import copies_of
from strategies.split_variable import RepeatedVariable, SplitVariable
from strategies.tf_private import free_values

SHARD_CHOICES = "optimizer", "gradients", "weights"


class Part(NamedTuple):
    """What a device keeps: of each weight a range of its elements, flat, and their optimizer."""

    device: str
    weights: list[keras.Variable]
    optimizer: keras.optimizers.Optimizer


class ShardedStrategy(base.Strategy):
    """Data parallelism whose state is split over the devices."""

    name = "sharded"

    def __init__(self, devices: Sequence[str], *, shard: str = "weights", **options: Any):
        super().__init__(devices, **options)
        self.splits_gradients, self.splits_weights = shard != "optimizer", shard == "weights"
        self.num_copies = 1 if self.splits_weights else self.num_replicas

    def build(self, model_fn: base.ModelFn, optimizer_fn: base.OptimizerFn) -> None:
        self.model = model_fn()
        self._optimizer_shapes = optimizer_shapes(self.model, optimizer_fn)
        self._shapes = [tf.TensorShape(v.shape) for v in self.model.trainable_variables]
        self.replicas, self.parts = [], []
        for device_id, device in enumerate(self.devices):
            with tf.device(device):
                self.parts.append(self._new_part(device_id, device, optimizer_fn()))
                self.replicas.append(self._new_replica(device_id, device, model_fn))
        self.optimizer = self.parts[0].optimizer
        if self.splits_weights:
            free_values(self.model.variables)

    def train_step(self, iterator: base.BatchIterator) -> base.StepTotals:
        images, labels = next(iterator)
        weights = self.replica_weights
        shards = split_batch((images, labels), self.devices, weights)  # 1. A shard for each device.
        replicas = self._with_weights()  # 2. All-gather.
        per_replica_gradients, per_replica_totals = gradients_on_each_device(  # 3. Gradients.
            self, replicas, shards, tf.size(labels)
        )
        per_device_sums = self._sum_in_parts(per_replica_gradients)  # 4. Reduce-scatter.
        for part, sums in zip(self.parts, per_device_sums, strict=True):
            with tf.device(part.device):
                part.optimizer.apply(sums, part.weights)  # 5. The update of its own part.
        if not self.splits_weights:
            self._assign_weights()
        self._observe_update(per_device_sums)
        return base.StepTotals.sum(per_replica_totals)

    def _sum_in_parts(self, per_replica_gradients: PerReplicaTensors) -> PerReplicaTensors:
        """Sums gradients; item [r][v] of what is returned is part r of sum v, on device r."""
        if self.splits_gradients:
            return self._reduce_scatter(per_replica_gradients)
        per_device_parts = []
        for r, sums in enumerate(all_reduce(per_replica_gradients, self.devices)):
            with tf.device(self.devices[r]):
                per_device_parts.append([self._part(total, r) for total in sums])
        return per_device_parts

    def _reduce_scatter(self, per_replica_tensors: PerReplicaTensors) -> PerReplicaTensors:
        parts = []
        for device, tensors in zip(self.devices, per_replica_tensors, strict=True):
            with tf.device(device):
                parts.append([tf.reshape(tensor, [-1]) for tensor in tensors])
        per_variable = [
            collectives.reduce_scatter(
                copies, collectives.shard_sizes(copies[0].shape[0], len(copies)), self.devices
            )
            for copies in zip(*parts, strict=True)
        ]
        return [list(parts) for parts in zip(*per_variable, strict=True)]

    def _all_gather(
        self, per_device_parts: PerReplicaTensors, shapes: Sequence[tf.TensorShape]
    ) -> PerReplicaTensors:
        """Joins the parts of each tensor on every device; the opposite of the scatter."""
        per_variable = [
            collectives.all_gather(parts, self.devices)
            for parts in zip(*per_device_parts, strict=True)
        ]
        wholes = []
        for r, device in enumerate(self.devices):
            with tf.device(device):
                wholes.append(
                    [tf.reshape(v[r], shape) for v, shape in zip(per_variable, shapes, strict=True)]
                )
        return wholes

    def _gathered_weights(self) -> PerReplicaTensors:
        parts = []
        for part in self.parts:
            with tf.device(part.device):  # Read once, so that every device gets the same.
                parts.append([tf.identity(weight.value) for weight in part.weights])
        paths = [variable.path for variable in self.model.trainable_variables]
        per_device_weights = []
        for r, weights in enumerate(self._all_gather(parts, self._shapes)):
            with tf.device(self.devices[r]):
                named = dict(zip(paths, weights, strict=True))
                per_device_weights.append(list(self.observer.on_weights(r, named).values()))
        return per_device_weights

    def _with_weights(self) -> list[base.Replica]:
        """Returns the replicas, with gathered weights where they have none of their own."""
        if not self.splits_weights:
            return self.replicas
        gathered = self._gathered_weights()
        return [r._replace(weights=w) for r, w in zip(self.replicas, gathered, strict=True)]

    def _assign_weights(self) -> None:
        """Gathers the updated weights into the model of each device."""
        for replica, weights in zip(self.replicas, self._gathered_weights(), strict=True):
            with tf.device(replica.device):
                for variable, new in zip(replica.model.trainable_variables, weights, strict=True):
                    variable.assign(new)

    def _observe_update(self, per_device_sums: PerReplicaTensors) -> None:
        """Shows the whole sums to the observer; where it ignores them, nothing is gathered."""
        whole_sums = self._all_gather(per_device_sums, self._shapes)
        for copy_id in range(self.num_copies):
            with tf.device(self.devices[copy_id]):
                self.observer.on_update(copy_id, whole_sums[copy_id])

    def all_reduce(self, per_replica_tensors: PerReplicaTensors) -> PerReplicaTensors:
        shapes = [tensor.shape for tensor in per_replica_tensors[0]]
        return self._all_gather(self._reduce_scatter(per_replica_tensors), shapes)

    def forward(
        self, iterator: base.BatchIterator, statistics: base.Statistics
    ) -> list[base.LogitsAndTotals]:
        images, labels = next(iterator)
        shards = split_batch((images, labels), self.devices, self.replica_weights)
        results = []
        for replica, shard in zip(self._with_weights(), shards, strict=True):
            with tf.device(replica.device):
                results.append(self.classify(replica, shard, tf.size(labels), statistics))
        return results

    def _new_part(
        self, device_id: int, device: str, optimizer: keras.optimizers.Optimizer
    ) -> Part:
        weights = [
            keras.Variable(
                self._part(tf.convert_to_tensor(v.value), device_id),
                dtype=v.dtype,
                name=v.path.replace("/", "_"),
            )
            for v in self.model.trainable_variables
        ]
        optimizer.build(weights)
        return Part(device, weights, optimizer)

    def _new_replica(self, device_id: int, device: str, model_fn: base.ModelFn) -> base.Replica:
        """Creates what a device has besides its part: the whole model, or its statistics alone."""
        optimizer = self.parts[device_id].optimizer
        if self.splits_weights:
            own = self.model.non_trainable_variables
            statistics = [copies_of(own) for _ in range(self.shards_per_replica)]
            return base.Replica(device_id, device, self.model, optimizer, statistics)
        model = model_fn() if device_id else self.model
        for variable, first in zip(model.variables, self.model.variables, strict=True):
            variable.assign(first)
        return base.Replica(device_id, device, model, optimizer, self.new_statistics(model))

    def _part(self, tensor: tf.Tensor, device_id: int) -> tf.Tensor:
        """Returns the elements of a tensor that a device keeps, flat."""
        flat = tf.reshape(tensor, [-1])
        start, end = collectives.shard_bounds(flat.shape[0], len(self.devices), device_id)
        return flat[start:end]

    def copies(self) -> list[Variables]:
        parts = zip(*(part.optimizer.variables for part in self.parts), strict=True)
        optimizer = {
            name: _whole(parts_of_one, shape)
            for (name, shape), parts_of_one in zip(
                self._optimizer_shapes.items(), parts, strict=True
            )
        }
        if not self.splits_weights:
            return [
                {f"model/{v.path}": v.value for v in replica.model.variables} | optimizer
                for replica in self.replicas
            ]
        weights = zip(*(part.weights for part in self.parts), strict=True)
        split = {
            v.path: _whole(parts_of_one, v.shape)
            for v, parts_of_one in zip(self.model.trainable_variables, weights, strict=True)
        }
        own = zip(self.model.non_trainable_variables, self.replicas[0].statistics[0], strict=True)
        split |= {v.path: variable.value for v, variable in own}
        return [{f"model/{v.path}": split[v.path] for v in self.model.variables} | optimizer]

    def load_state(self, state: State) -> None:
        super().load_state(state)
        if not self.splits_weights:  # The parts that are updated, as in the models.
            for r, (part, replica) in enumerate(zip(self.parts, self.replicas, strict=True)):
                weights = replica.model.trainable_variables
                for own, whole in zip(part.weights, weights, strict=True):
                    own.assign(self._part(tf.convert_to_tensor(whole.value), r))


def _whole(
    parts: Sequence[keras.Variable], shape: Sequence[int]
) -> SplitVariable | RepeatedVariable:
    """Returns what stands for a variable: parts are flat, and numbers are on every device."""
    values = [part.value for part in parts]
    if len(parts[0].shape) == 0:
        return RepeatedVariable(values)
    return SplitVariable(values, 0, shape)
