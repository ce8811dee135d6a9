"""Defines the stages of a pipeline: consecutive layers of a network on one device each."""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import keras
import tensorflow as tf

from strategies import layer_calls
from strategies.copies import optimizer_names
from strategies.layer_calls import LayerCall
from strategies.observer import Observer, Shard
from strategies.shard_step import copies_of
from strategies.split_variable import RepeatedVariable


class Stage(NamedTuple):
    """Holds consecutive layers of a network and their variables on one device.

    Attributes:
        device: device name.
        calls: the layer calls; the variables of their layers are not used.
        weights: variables that replace the layers' trainable variables.
        statistics: for each micro-batch, variables that replace the non-trainable variables.
        optimizer: optimizer of the weights.
    """

    device: str
    calls: list[LayerCall]
    weights: list[keras.Variable]
    statistics: list[list[keras.Variable]]
    optimizer: keras.optimizers.Optimizer

    @classmethod
    def create(
        cls,
        calls: list[LayerCall],
        device: str,
        optimizer_fn: Callable[[], keras.optimizers.Optimizer],
        num_micro_batches: int,
    ) -> "Stage":
        """Creates the variables on the device, with the values of the layers' variables."""
        trainable, others = layer_calls.variables_of(calls)
        with tf.device(device):
            weights = copies_of(trainable)
            statistics = [copies_of(others) for _ in range(num_micro_batches)]
            optimizer = optimizer_fn()
            optimizer.build(weights)
        return cls(device, calls, weights, statistics, optimizer)

    @property
    def weight_paths(self) -> list[str]:
        """Paths of the trainable variables in the model."""
        return [variable.path for variable in layer_calls.variables_of(self.calls)[0]]

    @property
    def statistics_paths(self) -> list[str]:
        """Paths of the non-trainable variables in the model."""
        return [variable.path for variable in layer_calls.variables_of(self.calls)[1]]

    def forward(
        self,
        x: tf.Tensor,
        weights: Sequence[tf.Tensor],
        statistics: Sequence[tf.Tensor | tf.Variable],
        *,
        training: bool,
    ) -> tf.Tensor:
        """Returns the activations of this stage.

        Args:
            x: images, or activations of the previous stage, `(n, ...)` on this device.
            weights: tensors that replace the trainable variables.
            statistics: values that replace the non-trainable variables; variables among them are
                updated in training.
            training: passed to layers that behave differently in training.
        """

        def call_layers() -> tf.Tensor:
            tensors = layer_calls.run(self.calls, {self.calls[0].inputs[0]: x}, training=training)
            return tensors[self.calls[-1].output]

        trainable, others = layer_calls.variables_of(self.calls)
        values = [*zip(trainable, weights, strict=True), *zip(others, statistics, strict=True)]
        return layer_calls.with_values(call_layers, values)


class Pipeline:
    """Holds the stages of one copy of the weights.

    Args:
        model: the model that was cut; used only for the names and order of its variables.
        stages: stages in the order of the network.

    Attributes:
        stages: see above.
        devices: devices of the stages.
    """

    def __init__(self, model: keras.Model, stages: Sequence[Stage]):
        self.stages, self.devices = list(stages), [stage.device for stage in stages]
        paths = [path for stage in stages for path in stage.weight_paths]
        # For each weight of the model, its position among the weights of all stages.
        self._order = [paths.index(variable.path) for variable in model.trainable_variables]

    def micro_batches(
        self, images: tf.Tensor, labels: tf.Tensor, bounds: Sequence[tuple[tf.Tensor, tf.Tensor]]
    ) -> list[Shard]:
        """Returns the micro-batches, with images on the first device and labels on the last one."""
        micro_batches = []
        for start, end in bounds:
            own_images, own_labels = images[start:end], labels[start:end]
            with tf.device(self.devices[0]):
                own_images = tf.identity(own_images)
            with tf.device(self.devices[-1]):
                own_labels = tf.identity(own_labels)
            micro_batches.append(Shard(own_images, own_labels, tf.size(labels)))
        return micro_batches

    def read_weights(self, observer: Observer, first_device_id: int) -> list[list[tf.Tensor]]:
        """Reads the weights of each stage once, so that all passes use the same values."""
        weights = []
        for k, stage in enumerate(self.stages):
            with tf.device(stage.device):
                read = [tf.identity(variable.value) for variable in stage.weights]
                named = dict(zip(stage.weight_paths, read, strict=True))
                weights.append(list(observer.on_weights(first_device_id + k, named).values()))
        return weights

    def to_model_order(self, per_stage: Sequence[Sequence[tf.Tensor]]) -> list[tf.Tensor]:
        """Returns per-stage tensors of all weights in the order of the model."""
        flat = [tensor for tensors in per_stage for tensor in tensors]
        return [flat[position] for position in self._order]

    def to_stages(self, tensors: Sequence[tf.Tensor]) -> list[list[tf.Tensor]]:
        """Returns tensors of all weights by stage; the inverse of `to_model_order`."""
        by_position = dict(zip(self._order, tensors, strict=True))
        flat = iter(by_position[position] for position in range(len(tensors)))
        return [[next(flat) for _ in stage.weights] for stage in self.stages]

    def classify(self, images: tf.Tensor, statistics: Mapping[str, tf.Tensor]) -> tf.Tensor:
        """Returns the logits of images, computed with the given moving statistics."""
        x = images
        for stage in self.stages:
            with tf.device(stage.device):
                weights = [variable.value for variable in stage.weights]
                own = [
                    statistics.get(path, variable.value)
                    for path, variable in zip(
                        stage.statistics_paths, stage.statistics[0], strict=True
                    )
                ]
                x = stage.forward(x, weights, own, training=False)
        return x

    def statistics(self, m: int) -> dict[str, tf.Variable]:
        """Returns name → variable for the per-shard variables of micro-batch m."""
        return {
            f"model/{path}": variable.value
            for stage in self.stages
            for path, variable in zip(stage.statistics_paths, stage.statistics[m], strict=True)
        }

    def variables(self, names: Sequence[str]) -> dict[str, tf.Variable | RepeatedVariable]:
        """Returns name → variable for the whole copy, in the given order of names."""
        found: dict[str, list[tf.Variable]] = {name: [] for name in names}
        for name, variable in self.statistics(0).items():
            found[name].append(variable)
        for stage in self.stages:
            for path, weight in zip(stage.weight_paths, stage.weights, strict=True):
                found[f"model/{path}"].append(weight.value)
            own_names = optimizer_names(stage.optimizer)
            for name, variable in zip(own_names, stage.optimizer.variables, strict=True):
                found[name].append(variable.value)  # Every stage has a step counter.
        return {
            name: variables[0] if len(variables) == 1 else RepeatedVariable(variables)
            for name, variables in found.items()
        }
