"""Defines the base class of `pipeline` and `tensor`, whose replicas span K devices each."""

import abc
from collections.abc import Callable, Sequence

import keras
import tensorflow as tf

from strategies.base import BatchIterator, ModelFn, OptimizerFn, Strategy
from strategies.collectives import PerReplicaTensors, direct
from strategies.copies import optimizer_shapes
from strategies.evaluation import LogitsAndTotals, Statistics, call_without_empty_batch
from strategies.gather_scatter import scatter
from strategies.layer_calls import LayerCalls
from strategies.tf_private import free_values

Classify = Callable[[tf.Tensor], tf.Tensor]  # Images to logits.


class ModelParallelStrategy(Strategy):
    """Trains R replicas on K devices each; without `model_parallel`, K is the number of devices."""

    def default_model_parallel(self) -> int:
        return self.num_devices

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
        self.optimizer = self.build_parts(LayerCalls.of(self.model), optimizer_fn)
        free_values(self.model.variables)  # The parts have their own variables.

    @abc.abstractmethod
    def build_parts(
        self, model_calls: LayerCalls, optimizer_fn: OptimizerFn
    ) -> keras.optimizers.Optimizer:
        """Creates each device's part of the model, with the initial values of the model.

        Returns:
            The optimizer of the first device.
        """

    @abc.abstractmethod
    def classifiers(self, statistics: Statistics) -> list[Classify]:
        """Returns one function from images to logits per replica, with the given statistics."""

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

    def all_reduce(self, per_replica_tensors: PerReplicaTensors) -> PerReplicaTensors:
        return _all_reduce(per_replica_tensors, self.local_replica_devices)

    def sum_over_replicas(
        self, per_replica_gradients: Sequence[PerReplicaTensors]
    ) -> list[PerReplicaTensors]:
        """Sums gradients over the replicas; item [r][k] is on device k of replica r."""
        sums: list[PerReplicaTensors] = [[] for _ in per_replica_gradients]
        for k in range(self.devices_per_replica):
            devices = [own[k] for own in self.replica_devices]
            of_device = [gradients[k] for gradients in per_replica_gradients]
            for r, totals in enumerate(_all_reduce(of_device, devices)):
                sums[r].append(totals)
        return sums

    def forward(self, iterator: BatchIterator, statistics: Statistics) -> list[LogitsAndTotals]:
        results = []
        parts = zip(
            self.local_replica_devices,
            self.classifiers(statistics),
            self.scatter(next(iterator)),
            strict=True,
        )
        for device, classify, (images, labels) in parts:
            with tf.device(device):
                logits = call_without_empty_batch(classify, images)
                _, totals = self.loss(logits, labels, tf.size(labels))
            results.append((logits, totals))
        return results


def _all_reduce(tensors: PerReplicaTensors, devices: Sequence[str]) -> PerReplicaTensors:
    return direct(tensors, devices) if len(devices) > 1 else tensors
