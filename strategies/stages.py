"""Defines the stages of a pipeline: consecutive layers of a network on one device each."""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import keras
import tensorflow as tf

from strategies import layer_calls
from strategies.copies import optimizer_names
from strategies.layer_calls import LayerCall
from strategies.loss import apply_in_parts, unscaled
from strategies.observer import Shard
from strategies.replica import copies_of
from strategies.split_variable import RepeatedVariable
from strategies.step_totals import StepTotals


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
    def weight_shapes(self) -> dict[str, tuple[int, ...]]:
        """Path of each trainable variable in the model → its shape."""
        shapes = [tuple(weight.shape) for weight in self.weights]
        return dict(zip(self.weight_paths, shapes, strict=True))

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
        """Returns the activations of this stage for images, or activations of the previous stage.

        `weights` and `statistics` replace the trainable and the other variables; variables among
        `statistics` are updated in training.
        """

        def call_layers() -> tf.Tensor:
            tensors = layer_calls.run(self.calls, {self.calls[0].inputs[0]: x}, training=training)
            return tensors[self.calls[-1].output]

        trainable, others = layer_calls.variables_of(self.calls)
        values = [*zip(trainable, weights, strict=True), *zip(others, statistics, strict=True)]
        return layer_calls.with_values(call_layers, values)


class Passes:
    """Runs micro-batches through the stages of a pipeline, and keeps what they have computed.

    Args:
        stages: the stages in the order of the network.
        weights: for each stage, tensors that replace its weights.
        recomputes: keep only the inputs of a stage, and compute its activations again.

    Attributes:
        gradients: (stage, micro-batch) → gradients of the stage's weights.
        shards: micro-batch → its examples and logits.
        losses: micro-batch → its part of the mean loss.
        totals: micro-batch → its totals.
    """

    def __init__(
        self,
        stages: Sequence[Stage],
        weights: Sequence[Sequence[tf.Tensor]],
        recomputes: bool,
    ):
        self._stages, self._weights, self._recomputes = stages, weights, recomputes
        self._inputs: dict[tuple[int, int], tuple] = {}
        self._taped: dict[tuple[int, int], tuple] = {}
        self.gradients: dict[tuple[int, int], list[tf.Tensor]] = {}
        self.shards: dict[int, Shard] = {}
        self.losses: dict[int, tf.Tensor] = {}
        self.totals: dict[int, StepTotals] = {}

    def forward(self, k: int, m: int, x: tf.Tensor) -> tf.Tensor:
        """Returns the activations of stage k for the inputs x of micro-batch m."""
        statistics = [variable.value for variable in self._stages[k].statistics[m]]
        is_last = k == len(self._stages) - 1  # Its backward pass follows at once.
        if self._recomputes and not is_last:
            # Moving statistics and random states are kept as they are before the pass.
            self._inputs[k, m] = x, [tf.identity(value) for value in statistics]
        tape, y = self._forward_on_tape(k, x, statistics)
        if not self._recomputes or is_last:
            self._taped[k, m] = tape, x, y
        return y

    def backward(
        self, k: int, m: int, dy: tf.Tensor, loss_scale: tf.Tensor | None
    ) -> tuple[tf.Tensor | None, list[tf.Tensor]]:
        """Computes the gradients of stage k for micro-batch m, by the chain rule.

        Args:
            k: the stage.
            m: the micro-batch.
            dy: gradient of the loss with respect to the stage's activations.
            loss_scale: the gradients of the weights are divided by it.

        Returns:
            The gradient with respect to the stage's inputs, None for images, and all gradients.
        """
        if (k, m) in self._inputs:
            x, statistics = self._inputs.pop((k, m))
            tape, y = self._forward_on_tape(k, x, statistics)
        else:
            tape, x, y = self._taped.pop((k, m))
        sources = [x, *self._weights[k]] if k > 0 else self._weights[k]
        found = tape.gradient(y, sources, output_gradients=dy)
        self.gradients[k, m] = unscaled(found[1:] if k > 0 else found, loss_scale)
        return (found[0] if k > 0 else None), found

    def _forward_on_tape(
        self, k: int, x: tf.Tensor, statistics: Sequence[tf.Tensor | tf.Variable]
    ) -> tuple[tf.GradientTape, tf.Tensor]:
        weights = self._weights[k]
        with tf.GradientTape() as tape:
            tape.watch([x, *weights] if x.dtype.is_floating else weights)
            return tape, self._stages[k].forward(x, weights, statistics, training=True)


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

    def read_weights(self) -> list[list[tf.Tensor]]:
        """Reads the weights of each stage once, so that all passes use the same values."""
        weights = []
        for stage in self.stages:
            with tf.device(stage.device):
                weights.append([tf.identity(variable.value) for variable in stage.weights])
        return weights

    def update(self, per_stage_sums: list[list[tf.Tensor]]) -> None:
        """Updates the weights of each stage with its summed gradients, on its device."""
        optimizers = [stage.optimizer for stage in self.stages]
        weights = [stage.weights for stage in self.stages]
        apply_in_parts(self.devices, optimizers, weights, per_stage_sums)

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
