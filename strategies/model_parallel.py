"""Defines the base class of `pipeline` and `tensor`, whose replicas span K devices each.

It has what both share: the variables of the parts, the sum over the replicas, and evaluation.
"""

import abc
import functools
from collections.abc import Sequence
from typing import ClassVar

import tensorflow as tf

from strategies.base import BatchIterator, ModelFn, OptimizerFn, Strategy
from strategies.collectives import PerReplicaTensors, direct, scatter
from strategies.copies import Variables, optimizer_shapes
from strategies.evaluation import LogitsAndTotals, Statistics, call_without_empty_batch
from strategies.layer_calls import LayerCalls
from strategies.parts import DevicePart, update_parts, whole_variables
from strategies.step_totals import StepTotals
from strategies.tf_private import free_values


class ModelParallelStrategy(Strategy):
    """Trains R replicas on K devices each; without `model_parallel`, K is the number of devices.

    Attributes:
        parts: the parts of the weights; item [r][k] is on device k of replica r.
        split_axis: axis along which a variable is split over the devices of a replica; None if
            each device has whole variables.
    """

    parts: list[list[DevicePart]]
    split_axis: ClassVar[int | None] = None

    def prepare(self) -> None:
        if self.options.jit_compile:
            raise ValueError(f"--jit_compile is not available in {self.name}; leave the flag out")

    def default_all_reduce(self) -> str:
        return "direct" if self.num_replicas > 1 else "none"

    def build(self, model_fn: ModelFn, optimizer_fn: OptimizerFn) -> None:
        with tf.device("CPU:0"):  # In main memory, because it may not fit on one device.
            self.model = model_fn()
        names = optimizer_shapes(self.model.trainable_variables, optimizer_fn)
        self.variable_names = [*(f"model/{v.path}" for v in self.model.variables), *names]
        self.weight_paths = [variable.path for variable in self.model.trainable_variables]
        self.split_layers(LayerCalls.of(self.model))
        self.parts = [self.build_parts(devices, optimizer_fn) for devices in self.replica_devices]
        self.optimizer = self.parts[0][0].optimizer
        free_values(self.model.variables)  # The parts have their own variables.

    @abc.abstractmethod
    def split_layers(self, model_calls: LayerCalls) -> None:
        """Splits the layers of the model over the devices of each replica."""

    @abc.abstractmethod
    def build_parts(self, devices: Sequence[str], optimizer_fn: OptimizerFn) -> list[DevicePart]:
        """Creates each device's part of a replica, with the initial values of the model."""

    @abc.abstractmethod
    def logits(self, r: int, statistics: Statistics, images: tf.Tensor) -> tf.Tensor:
        """Returns the logits that replica r computes with the given statistics."""

    @abc.abstractmethod
    def join(self, r: int, per_part_tensors: PerReplicaTensors) -> list[tf.Tensor]:
        """Returns one whole tensor per weight of the model, given those of replica r's parts."""

    @abc.abstractmethod
    def split(self, r: int, wholes: Sequence[tf.Tensor]) -> PerReplicaTensors:
        """Returns each part's tensors of whole ones; the inverse of `join`."""

    @property
    def replica_devices(self) -> list[list[str]]:
        """The devices of each replica."""
        size = self.devices_per_replica
        return [self.devices[i : i + size] for i in range(0, self.num_devices, size)]

    def scatter(self, batch: Sequence[tf.Tensor]) -> list[tuple[tf.Tensor, ...]]:
        """Copies each replica's part of a batch to the first device of the replica."""
        num_examples = tf.shape(batch[0])[0]
        bounds = [self.replica_bounds(num_examples, r) for r in range(self.num_replicas)]
        return scatter(batch, self.local_replica_devices, bounds)

    def read_weights(self, r: int) -> list[dict[str, tf.Tensor]]:
        """Reads the weights of each part of replica r: path of the model's variable → tensor."""
        return [part.read_weights() for part in self.parts[r]]

    def all_reduce(self, per_replica_tensors: PerReplicaTensors) -> PerReplicaTensors:
        return _all_reduce(per_replica_tensors, self.local_replica_devices)

    def update(self, per_replica_gradients: Sequence[PerReplicaTensors]) -> None:
        """Sums gradients over the replicas, and updates each device's part of the weights.

        Args:
            per_replica_gradients: item [r][k] has the gradients of part k of replica r.
        """
        per_device_sums = []
        for k in range(self.devices_per_replica):
            devices = [own[k] for own in self.replica_devices]
            gradients = [per_part_gradients[k] for per_part_gradients in per_replica_gradients]
            per_device_sums.append(_all_reduce(gradients, devices))
        for r, parts in enumerate(self.parts):
            sums = [per_replica_sums[r] for per_replica_sums in per_device_sums]
            update_parts(parts, sums)
            self.observer.on_update(r, self.join(r, sums))

    def forward(self, iterator: BatchIterator, statistics: Statistics) -> list[LogitsAndTotals]:
        results = []
        for r, (images, labels) in enumerate(self.scatter(next(iterator))):
            with tf.device(self.replica_devices[r][0]):
                own_logits = functools.partial(self.logits, r, statistics)
                logits = call_without_empty_batch(own_logits, images)
                results.append((logits, StepTotals.of(logits, labels)))
        return results

    @property
    def part_shapes(self) -> list[dict[str, tuple[int, ...]]]:
        return [part.weight_shapes for parts in self.parts for part in parts]

    def copies(self) -> list[Variables]:
        copies: list[Variables] = []
        for parts in self.parts:
            per_device = [part.variables() | part.shard_variables(0) for part in parts]
            copies.append(whole_variables(self.variable_names, per_device, self.split_axis))
        return copies

    def shard_variables(self) -> list[Variables]:
        names = [f"model/{variable.path}" for variable in self.model.non_trainable_variables]
        shards: list[Variables] = []
        for parts in self.parts:
            for index in range(self.shards_per_replica):
                per_device = [part.shard_variables(index) for part in parts]
                shards.append(whole_variables(names, per_device, self.split_axis))
        return shards


def _all_reduce(tensors: PerReplicaTensors, devices: Sequence[str]) -> PerReplicaTensors:
    return direct(tensors, devices) if len(devices) > 1 else tensors
