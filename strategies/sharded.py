"""Sharded data parallelism (ZeRO-3, "fully sharded"). Read this file from top to bottom.

As in `manual.py`, each device trains on its own shard of the global batch. `manual` stores R equal
copies of weights, gradients and optimizer state; here device r stores only part r of the rows of
each weight, and the optimizer state of these rows. One training step

1. splits the global batch,
2. copies the rows of all weights to every device (all-gather),
3. computes the gradients of each shard on its device,
4. sums part r of the rows of all gradients on device r (reduce-scatter), and
5. updates the rows of device r there. The gathered weights are freed.

A reduce-scatter followed by an all-gather is an all-reduce: the weights are those of `manual`.

Reference: S. Rajbhandari et al., "ZeRO", 2020, https://arxiv.org/abs/1910.02054.
"""

from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from strategies.base import (
    BatchIterator,
    ModelFn,
    OptimizerFn,
    Replica,
    Statistics,
    StepTotals,
    Strategy,
    classify,
    sum_of_losses,
)
from strategies.collectives import PerReplicaTensors, all_gather, reduce_scatter, split_rows
from strategies.manual import split_batch
from strategies.state import Variables, named_variables, optimizer_names


class ShardedStrategy(Strategy):
    """Trains data-parallel replicas whose weights and optimizer state are split over the devices.

    Attributes:
        rows: for each device, its rows of each weight.
        optimizers: for each device, the optimizer of its rows.
        moving: for each device, the moving statistics of its shards, which are not split.
    """

    name = "sharded"

    def prepare(self) -> None:
        """Sets the number of copies: the devices hold one together."""
        self.num_copies = 1

    def default_all_reduce(self) -> str:
        """Returns its name in records."""
        return "reduce_scatter"

    @property
    def optimizer(self) -> keras.optimizers.Optimizer:
        """The optimizer of the first device."""
        return self.optimizers[0]

    def build(self, model_fn: ModelFn, optimizer_fn: OptimizerFn) -> None:
        """Builds the model in main memory, and copies to each device its rows of the weights."""
        with tf.device("CPU:0"):  # The whole weights there are not used again.
            self.replicas = [Replica.build(model_fn, optimizer_fn)]
        weights, others = self.model.trainable_variables, self.model.non_trainable_variables
        parts = [split_rows(tf.convert_to_tensor(weight), len(self.devices)) for weight in weights]
        self.rows, self.optimizers, self.moving = [], [], []
        for device, own in zip(self.devices, zip(*parts, strict=True), strict=True):
            with tf.device(device):
                self.rows.append([
                    keras.Variable(rows, dtype=weight.dtype, name=weight.path.replace("/", "_"))
                    for rows, weight in zip(own, weights, strict=True)
                ])  # fmt: skip
                self.moving.append([tf.Variable(variable.value) for variable in others])
                self.optimizers.append(optimizer_fn())
                self.optimizers[-1].build(self.rows[-1])

    def train_step(self, iterator: BatchIterator) -> StepTotals:
        """Trains on one global batch."""
        shards = split_batch(next(iterator), self.devices)  # 1. Split.
        per_replica_weights = self.gather_weights()  # 2. All-gather.
        gradients, totals = [], []
        for r, (weights, shard) in enumerate(zip(per_replica_weights, shards, strict=True)):
            with tf.device(self.devices[r]):  # 3. Gradients.
                with tf.GradientTape() as tape:
                    tape.watch(weights)
                    logits, moved = self.model.stateless_call(
                        weights, self.moving[r], shard.images, training=True
                    )
                    loss_sum = sum_of_losses(logits, shard.labels, self.label_smoothing)
                    loss = loss_sum / tf.cast(shard.num_global_examples, tf.float32)
                own = tape.gradient(loss, weights)
                for variable, value in zip(self.moving[r], moved, strict=True):
                    variable.assign(value)
                gradients.append(self.observer.on_shard(r, shard, logits, loss, own))
                totals.append(StepTotals.of(logits, shard.labels))
        per_device_sums = reduce_scatter(gradients, self.devices)  # 4. Reduce-scatter.
        updates = zip(self.devices, self.optimizers, self.rows, per_device_sums, strict=True)
        for device, optimizer, rows, sums in updates:
            with tf.device(device):  # 5. The update of its own rows.
                optimizer.apply(sums, rows)
        # The observer gets whole sums; TensorFlow prunes this gather if it ignores them.
        whole_sums = all_gather(per_device_sums, self.devices)
        with tf.device(self.devices[0]):
            self.observer.on_update(0, whole_sums[0])
        return StepTotals.sum(totals)

    def gather_weights(self) -> PerReplicaTensors:
        """Returns the whole weights on every device."""
        parts = []
        for device, rows in zip(self.devices, self.rows, strict=True):
            with tf.device(device):  # Read once, so that the whole step uses the same values.
                parts.append([tf.identity(variable.value) for variable in rows])
        return all_gather(parts, self.devices)

    def all_reduce(self, per_replica_tensors: PerReplicaTensors) -> PerReplicaTensors:
        """Sums tensors as a step does: reduce-scatter, then the all-gather of the next step."""
        return all_gather(reduce_scatter(per_replica_tensors, self.devices), self.devices)

    def evaluate_step(self, iterator: BatchIterator, statistics: Statistics) -> StepTotals:
        """Evaluates the shards of one global batch, each on its device."""
        shards, totals = split_batch(next(iterator), self.devices), []
        for device, weights, shard in zip(self.devices, self.gather_weights(), shards, strict=True):
            with tf.device(device):
                totals.append(classify(self.model, shard, statistics, weights))
        return StepTotals.sum(totals)

    def copies(self) -> list[Variables]:
        """Returns name → variable of the only copy; each is one variable over all devices."""
        whole = self.replicas[0].optimizer
        wholes: dict[str, Any] = dict(named_variables(self.model, whole))
        weights = [f"model/{v.path}" for v in self.model.trainable_variables]
        per_device = [
            dict(zip(weights, rows, strict=True))
            | dict(zip(optimizer_names(whole), optimizer.variables, strict=True))
            for rows, optimizer in zip(self.rows, self.optimizers, strict=True)
        ]
        for name in per_device[0]:
            parts = [variables[name].value for variables in per_device]
            wholes[name] = SplitVariable(parts, wholes[name].shape)
        return [{**wholes, **self.shard_variables()[0]}]

    def shard_variables(self) -> list[Variables]:
        """Returns name → moving statistic for each device."""
        names = [f"model/{variable.path}" for variable in self.model.non_trainable_variables]
        return [dict(zip(names, own, strict=True)) for own in self.moving]


class SplitVariable:
    """A variable whose rows are split over devices; a scalar has a copy on each device."""

    def __init__(self, parts: Sequence[tf.Variable], shape: tf.TensorShape):
        self.parts, self.shape, self.dtype = parts, shape, tf.as_dtype(parts[0].dtype)

    def numpy(self) -> np.ndarray:
        """Returns the whole array."""
        arrays = [part.numpy() for part in self.parts]
        return np.concatenate(arrays) if self.shape.rank else arrays[0]

    def assign(self, value: np.ndarray) -> None:
        """Assigns to each device its rows of a whole array, or the scalar."""
        pieces = [value] * len(self.parts)
        if self.shape.rank:
            pieces = np.split(value, np.cumsum([part.shape[0] for part in self.parts])[:-1])
        for part, piece in zip(self.parts, pieces, strict=True):
            part.assign(piece)
