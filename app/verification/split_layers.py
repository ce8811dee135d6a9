"""Computes a layerwise-partitioned step without the sums of its backward pass.

Runs on one device, to test a hypothesis: lists hold the values of the devices.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import keras
import numpy as np
import tensorflow as tf

from strategies.layer_calls import LayerCall, LayerCalls

Forward = Callable[[keras.Model, tf.Tensor], tf.Tensor]

# Layers that need all channels of their input; other layers process channels separately.
_NEED_ALL_CHANNELS = (
    keras.layers.Conv2D,
    keras.layers.Dense,
    keras.layers.Flatten,
    keras.layers.Reshape,
)


class _Value(NamedTuple):
    """A tensor as seen by each device.

    Attributes:
        tensors: one per device; the same object if they do not differ.
        sizes: number of channels on each device, if split; None if all devices have the whole
            tensor.
    """

    tensors: list[tf.Tensor]
    sizes: Sequence[int] | None


def without_backward_sums(sizes: Mapping[str, Sequence[int]]) -> Forward:
    """Returns a forward pass whose gathers return to each device only its own gradient.

    The logits are those of the model. In the backward pass of a gather, each device should sum the
    gradients of all devices for its channels; here it uses only its own.

    Args:
        sizes: path of a weight → its output channels on each device.
    """

    def forward(model: keras.Model, images: tf.Tensor) -> tf.Tensor:
        calls, num_devices = LayerCalls.of(model), len(next(iter(sizes.values())))
        values = {calls.input: _Value([images] * num_devices, None)}
        for call in calls.calls:
            inputs = [values[i] for i in call.inputs]
            values[call.output] = _call(call, inputs, sizes)
        return values[calls.output].tensors[0]

    return forward


def _call(call: LayerCall, inputs: Sequence[_Value], sizes: Mapping[str, Sequence[int]]) -> _Value:
    layer = call.layer
    if not isinstance(layer, _NEED_ALL_CHANNELS):
        tensors = _on_each(lambda *x: call(x, training=True), [v.tensors for v in inputs])
        return _Value(tensors, inputs[0].sizes)
    gathered = [_gather(value) for value in inputs]
    tensors = _on_each(lambda *x: call(x, training=True), gathered)
    if not layer.trainable_variables:
        return _Value(tensors, None)
    own_sizes = sizes[layer.trainable_variables[0].path]
    parts = [tf.split(tensor, own_sizes, axis=-1)[d] for d, tensor in enumerate(tensors)]
    return _Value([tf.concat(parts, axis=-1)] * len(tensors), own_sizes)


def _gather(value: _Value) -> list[tf.Tensor]:
    """Returns the whole tensor for each device, with only the gradient of its own channels."""
    if value.sizes is None:
        return value.tensors
    whole, ends = value.tensors[0], np.cumsum(value.sizes)
    copies = []
    for end, size in zip(ends, value.sizes, strict=True):
        is_own = np.zeros(ends[-1], whole.dtype.as_numpy_dtype)
        is_own[end - size : end] = 1
        constant = tf.stop_gradient(whole)
        copies.append(constant + (whole - constant) * is_own)
    return copies


def _on_each(
    function: Callable[..., tf.Tensor], per_input: Sequence[Sequence[tf.Tensor]]
) -> list[tf.Tensor]:
    """Calls a function for each device; once if all have the same tensors."""
    if all(tensor is tensors[0] for tensors in per_input for tensor in tensors):
        return [function(*(tensors[0] for tensors in per_input))] * len(per_input[0])
    return [function(*own) for own in zip(*per_input, strict=True)]
