"""Splits the output channels of layers over devices."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import keras
import tensorflow as tf

from strategies.collectives import shard_bounds, shard_sizes
from strategies.device_tape import DeviceTape, PerDeviceTensors
from strategies.layer_calls import LayerCall, LayerCalls, with_values
from strategies.tf_private import free_values

# Layers that need all channels of their input to compute a part of those of their output.
_MIX_CHANNELS = keras.layers.Conv2D, keras.layers.Dense
# Layers that need all channels, have no weights, and are computed whole on every device.
_JOIN_CHANNELS = keras.layers.Flatten, keras.layers.Reshape
# Layers each of whose output channels comes from the same channel of every input.
_KEEP_CHANNELS = (
    keras.layers.Activation,
    keras.layers.Add,
    keras.layers.AveragePooling2D,
    keras.layers.BatchNormalization,
    keras.layers.GlobalAveragePooling2D,
    keras.layers.GlobalMaxPooling2D,
    keras.layers.MaxPooling2D,
    keras.layers.ReLU,
    keras.layers.Rescaling,
    keras.layers.ZeroPadding2D,
)


# Activations that look at one number at a time; a softmax looks at all channels.
_ELEMENTWISE = (
    *("linear", "relu", "relu6", "leaky_relu", "elu", "selu", "celu", "gelu", "silu", "tanh"),
    *("sigmoid", "hard_sigmoid", "hard_silu", "softplus", "softsign", "exponential", "mish"),
)


def channels_of(whole: tf.Tensor, device_id: int, num_devices: int) -> tf.Tensor:
    """Returns a device's part of the channels, the last axis of a tensor."""
    start, end = shard_bounds(whole.shape[-1], num_devices, device_id)
    return whole[..., start:end]


class SplitCall(NamedTuple):
    """Represents one layer call whose output channels are split over devices.

    Attributes:
        call: the call of the unsplit layer, whose variables are not used.
        layers: one layer per device, with its part of the channels; its variables have no values.
        gathers: whether the layer needs all channels of its inputs.
        sizes: output channels on each device; None if every device computes all channels.
    """

    call: LayerCall
    layers: list[keras.layers.Layer]
    gathers: bool
    sizes: list[int] | None

    def on_each_device(
        self,
        tape: DeviceTape,
        inputs: Sequence[PerDeviceTensors],
        values: Sequence[Mapping[str, tf.Tensor | tf.Variable]],
        *,
        training: bool,
    ) -> PerDeviceTensors:
        """Calls each part of the layer on its own device.

        Args:
            tape: records the call.
            inputs: inputs of the layer.
            values: for each device, path of the unsplit variable → value of its part. The call
                updates moving statistics that are given as variables.
            training: passed to layers that behave differently in training.
        """
        paths = [variable.path for variable in self.call.layer.variables]
        weights = [[named[v.path] for v in self.call.layer.trainable_variables] for named in values]

        def call_part(d: int, *tensors: tf.Tensor) -> tf.Tensor:
            part = self.layers[d]
            own = [(v, values[d][path]) for path, v in zip(paths, part.variables, strict=True)]
            return with_values(lambda: self.call(tensors, training=training, layer=part), own)

        return tape.each(call_part, inputs, weights)


def split_calls(model_calls: LayerCalls, devices: Sequence[str]) -> list[SplitCall]:
    """Splits the layers of a network by their output channels.

    Args:
        model_calls: layer calls of the network.
        devices: T device names.

    Raises:
        ValueError: a layer has fewer channels than devices, or cannot be split.
    """
    sizes: dict[int, list[int] | None] = {model_calls.input: None}
    split = []
    for call in model_calls.calls:
        layer, num_channels = call.layer, call.layer.output.shape[-1]
        gathers = isinstance(layer, _MIX_CHANNELS + _JOIN_CHANNELS)
        own_sizes = sizes[call.inputs[0]]
        if isinstance(layer, _MIX_CHANNELS):
            own_sizes = shard_sizes(num_channels, len(devices))
        elif isinstance(layer, _JOIN_CHANNELS):
            own_sizes = None
        _check(call, own_sizes, [sizes[i] for i in call.inputs], gathers)
        sizes[call.output] = own_sizes
        layers = []
        for d, device in enumerate(devices):
            with tf.device(device):
                layers.append(_part_of(layer, own_sizes, d))
        split.append(SplitCall(call, layers, gathers, own_sizes))
    return split


def _check(
    call: LayerCall, sizes: list[int] | None, inputs: list[list[int] | None], gathers: bool
) -> None:
    """Raises `ValueError` if a layer cannot be split by output channels."""
    layer = call.layer
    what = f"layer {layer.name} ({type(layer).__name__})"
    if sizes and not all(sizes):
        raise ValueError(
            f"{what} has {sum(sizes)} channels, too few for {len(sizes)} devices; use"
            f" --model_parallel={sum(sizes)} or less"
        )
    known = isinstance(layer, _MIX_CHANNELS + _JOIN_CHANNELS + _KEEP_CHANNELS)
    has_parts = (
        getattr(layer, "groups", 1) == 1
        and getattr(layer, "axis", -1) in (-1, len(layer.output.shape) - 1)
        and getattr(layer, "data_format", None) in (None, "channels_last")
        and getattr(getattr(layer, "activation", None), "__name__", "linear") in _ELEMENTWISE
    )
    if not known or not has_parts or not (gathers or all(i == inputs[0] for i in inputs)):
        raise ValueError(
            f"{what} cannot be split by its channels; use another strategy, or another layer"
        )
    if layer.variables and sizes is None:
        raise ValueError(f"{what} has weights, and all channels on every device: cannot be split")


def _part_of(
    layer: keras.layers.Layer, sizes: Sequence[int] | None, device_id: int
) -> keras.layers.Layer:
    """Returns a layer with a part of the output channels, whose variables have no values."""
    config = layer.get_config()
    if sizes:
        config |= {key: sizes[device_id] for key in ("filters", "units") if key in config}
    part = type(layer).from_config(config)
    if layer.variables and sizes:
        shape = list(layer.input.shape)
        if isinstance(layer, keras.layers.BatchNormalization):
            shape[-1] = sizes[device_id]
        part.build(shape)
        free_values(part.variables)
    return part
