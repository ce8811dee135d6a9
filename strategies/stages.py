"""Defines the stages of a pipeline: consecutive layers of a network on one device each."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import tensorflow as tf

from strategies.base import Bounds
from strategies.layer_calls import LayerCall, variables_of, with_values
from strategies.loss import unscaled
from strategies.observer import Shard
from strategies.parts import DevicePart
from strategies.step_totals import StepTotals

Values = Mapping[str, tf.Tensor | tf.Variable]  # Path of a variable of the model → its value.


class Stage(NamedTuple):
    """Represents consecutive layers of a network on one device.

    Attributes:
        calls: the layer calls; the variables of their layers are not used.
        part: the variables of the stage, with statistics for each micro-batch.
    """

    calls: list[LayerCall]
    part: DevicePart

    def forward(
        self, x: tf.Tensor, weights: Values, statistics: Values, *, training: bool
    ) -> tf.Tensor:
        """Returns the activations of this stage for images, or activations of the previous stage.

        `weights` and `statistics` replace the trainable and the other variables; variables among
        `statistics` are updated in training.
        """

        def call_layers() -> tf.Tensor:
            tensors = {self.calls[0].inputs[0]: x}
            for call in self.calls:
                inputs = [tensors[i] for i in call.inputs]
                tensors[call.output] = call(inputs, training=training)
            return tensors[self.calls[-1].output]

        trainable, others = variables_of(self.calls)
        values = [(variable, weights[variable.path]) for variable in trainable]
        values += [(variable, statistics[variable.path]) for variable in others]
        return with_values(call_layers, values)


def split_micro_batches(
    images: tf.Tensor, labels: tf.Tensor, bounds: Sequence[Bounds], devices: Sequence[str]
) -> list[Shard]:
    """Returns the micro-batches, with images on the first device and labels on the last one."""
    micro_batches = []
    for start, end in bounds:
        own_images, own_labels = images[start:end], labels[start:end]
        with tf.device(devices[0]):
            own_images = tf.identity(own_images)
        with tf.device(devices[-1]):
            own_labels = tf.identity(own_labels)
        micro_batches.append(Shard(own_images, own_labels, tf.size(labels)))
    return micro_batches


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
        weights: Sequence[Values],
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
        own = self._stages[k].part.statistics[m]
        statistics = {path: variable.value for path, variable in own.items()}
        # The backward pass of the last stage follows at once, so that nothing is recomputed.
        is_last = k == len(self._stages) - 1
        if self._recomputes and not is_last:
            # The pass changes moving statistics and random states; the second pass needs the old.
            saved = {path: tf.identity(value) for path, value in statistics.items()}
            self._inputs[k, m] = x, saved
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
        weights = list(self._weights[k].values())
        sources = [x, *weights] if k > 0 else weights
        found = tape.gradient(y, sources, output_gradients=dy)
        self.gradients[k, m] = unscaled(found[1:] if k > 0 else found, loss_scale)
        return (found[0] if k > 0 else None), found

    def _forward_on_tape(
        self, k: int, x: tf.Tensor, statistics: Values
    ) -> tuple[tf.GradientTape, tf.Tensor]:
        weights = self._weights[k]
        with tf.GradientTape() as tape:
            tape.watch(list(weights.values()))
            if x.dtype.is_floating:
                tape.watch(x)
            return tape, self._stages[k].forward(x, weights, statistics, training=True)
