"""Defines the base class of `pipeline` and `tensor`, whose replicas span K devices each."""

import abc
from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from strategies import base
from strategies.base import PerReplicaTensors
from strategies.copies import optimizer_shapes
from strategies.layer_calls import LayerCalls
from strategies.manual import all_reduce, split_batch
from strategies.prediction import call_without_empty_batch
from strategies.tf_private import free_values

Classify = Callable[[tf.Tensor], tf.Tensor]  # Images to logits.


class ModelParallelStrategy(base.Strategy):
    """Trains R replicas on K devices each.

    Args:
        devices: R * K device names; the devices of a replica are consecutive.
        model_parallel: K; None for all devices.
        **options: see `base.Strategy`.
    """

    def __init__(
        self, devices: Sequence[str], *, model_parallel: int | None = None, **options: Any
    ):
        super().__init__(devices, model_parallel=model_parallel or len(devices), **options)
        if self.jit_compile:
            raise ValueError(f"--jit_compile is not available in {self.name}; leave the flag out")

    def default_all_reduce(self) -> str:
        """Returns "none" for a single replica, which needs no all-reduce."""
        return "reduce_to_one" if self.num_replicas > 1 else "none"

    def build(self, model_fn: base.ModelFn, optimizer_fn: base.OptimizerFn) -> None:
        """Builds the model and splits its layers over the devices."""
        with tf.device("CPU:0"):  # In main memory, because it may not fit on one device.
            self.model = model_fn()
            names = optimizer_shapes(self.model.trainable_variables, optimizer_fn)
        self._variable_names = [*(f"model/{v.path}" for v in self.model.variables), *names]
        self.optimizer = self.build_parts(LayerCalls.of(self.model), optimizer_fn)
        free_values(self.model.variables)  # The parts have their own variables.

    @abc.abstractmethod
    def build_parts(
        self, model_calls: LayerCalls, optimizer_fn: base.OptimizerFn
    ) -> keras.optimizers.Optimizer:
        """Creates each device's part of the model, with the initial values of the model.

        Returns:
            The optimizer of the first device.
        """

    @abc.abstractmethod
    def classifiers(self, statistics: base.Statistics) -> list[Classify]:
        """Returns one function from images to logits per replica, with the given statistics."""

    @property
    def variable_names(self) -> list[str]:
        """Names of all variables of a copy: the model's, then those of an unsplit optimizer."""
        return self._variable_names

    @property
    def replica_devices(self) -> list[list[str]]:
        """The devices of each replica."""
        size = self.devices_per_replica
        return [self.devices[i : i + size] for i in range(0, self.num_devices, size)]

    def all_reduce(self, per_replica_tensors: PerReplicaTensors) -> PerReplicaTensors:
        """Sums tensors over the replicas, each on its first device."""
        return all_reduce(per_replica_tensors, self.local_replica_devices)

    def forward(
        self, iterator: base.BatchIterator, statistics: base.Statistics
    ) -> list[base.LogitsAndTotals]:
        """Computes the logits of one global batch; see `base.Strategy.forward`."""
        images, labels = next(iterator)
        firsts, results = self.local_replica_devices, []
        parts = split_batch((images, labels), firsts, self.replica_weights)
        for device, classify, part in zip(firsts, self.classifiers(statistics), parts, strict=True):
            with tf.device(device):
                logits = call_without_empty_batch(classify, part[0])
                _, totals = self.loss(logits, part[1], tf.size(labels))
            results.append((logits, totals))
        return results
