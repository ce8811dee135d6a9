"""Splits the output channels of layers over devices."""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import keras
import tensorflow as tf

from strategies.collectives import shard_sizes
from strategies.device_tape import DeviceTape, Spread
from strategies.layer_calls import LayerCall, LayerCalls, with_values
from strategies.loss import apply_in_parts
from strategies.split_variable import RepeatedVariable, SplitVariable

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


class SplitCall(NamedTuple):
    """Represents one layer call whose output channels are split over devices.

    Attributes:
        call: the call of the unsplit layer, whose variables are not used.
        layers: one layer per device, with its part of the channels and variables.
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
        inputs: Sequence[Spread],
        values: Sequence[Mapping[str, tf.Tensor]],
        *,
        training: bool,
    ) -> Spread:
        """Calls each part of the layer on its own device.

        Args:
            tape: records the call.
            inputs: inputs of the layer.
            values: for each device, path of the unsplit variable → value that replaces its part; a
                part without an entry keeps its variable, which the call may update.
            training: passed to layers that behave differently in training.
        """
        paths = [variable.path for variable in self.call.layer.variables]
        weights = [[named[v.path] for v in self.call.layer.trainable_variables] for named in values]

        def call_part(d: int, *tensors: tf.Tensor) -> tf.Tensor:
            part = self.layers[d]
            in_place = [
                (variable, values[d].get(path, variable.value))
                for path, variable in zip(paths, part.variables, strict=True)
            ]
            return with_values(lambda: self.call(tensors, training=training, layer=part), in_place)

        return tape.each(call_part, inputs, weights)


def split_calls(model_calls: LayerCalls, devices: Sequence[str]) -> list[SplitCall]:
    """Splits the layers of a network by their output channels.

    Args:
        model_calls: layer calls of the network, whose layers have the initial values.
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
    """Returns a layer with a part of the output channels and variables of the given layer."""
    config = layer.get_config()
    if sizes:
        config |= {key: sizes[device_id] for key in ("filters", "units") if key in config}
    part = type(layer).from_config(config)
    if layer.variables and sizes:
        shape = list(layer.input.shape)
        if isinstance(layer, keras.layers.BatchNormalization):
            shape[-1] = sizes[device_id]
        part.build(shape)
        start = sum(sizes[:device_id])
        for own, whole in zip(part.variables, layer.variables, strict=True):
            own.assign(tf.convert_to_tensor(whole.value)[..., start : start + sizes[device_id]])
    return part


class Row(NamedTuple):
    """Holds one copy of the weights, split over T devices.

    Attributes:
        devices: T device names.
        calls: the split layer calls.
        optimizers: one per device, for its parts of the weights.
    """

    devices: list[str]
    calls: list[SplitCall]
    optimizers: list[keras.optimizers.Optimizer]

    @classmethod
    def create(
        cls,
        devices: list[str],
        model_calls: LayerCalls,
        optimizer_fn: Callable[[], keras.optimizers.Optimizer],
    ) -> "Row":
        """Creates the parts of the layers, with their initial values, and the optimizers."""
        row = cls(devices, split_calls(model_calls, devices), [])
        for d, device in enumerate(devices):
            with tf.device(device):
                row.optimizers.append(optimizer_fn())
                row.optimizers[d].build(list(row.variables(d, trainable=True).values()))
        return row

    def variables(self, device_id: int, *, trainable: bool) -> dict[str, keras.Variable]:
        """Returns path of the unsplit variable → a device's part of it."""
        return {
            whole.path: part
            for split in self.calls
            for whole, part in zip(
                split.call.layer.variables, split.layers[device_id].variables, strict=True
            )
            if whole.trainable == trainable
        }

    def update(self, per_device_sums: list[list[tf.Tensor]]) -> None:
        """Updates each device's parts of the weights with their summed gradients."""
        ids = range(len(self.devices))
        weights = [list(self.variables(d, trainable=True).values()) for d in ids]
        apply_in_parts(self.devices, self.optimizers, weights, per_device_sums)

    def weight_shapes(self) -> list[dict[str, tuple[int, ...]]]:
        """Returns for each device: path of the unsplit variable → shape of its part."""
        per_device = [self.variables(d, trainable=True) for d in range(len(self.devices))]
        return [{path: tuple(part.shape) for path, part in parts.items()} for parts in per_device]

    def read_weights(self) -> list[dict[str, tf.Tensor]]:
        """Reads the weights of each device: path of the unsplit variable → its part."""
        per_device = []
        for d, device in enumerate(self.devices):
            with tf.device(device):
                parts = self.variables(d, trainable=True).items()
                per_device.append({path: tf.identity(part.value) for path, part in parts})
        return per_device

    def parts_of(self, tensors: Mapping[str, tf.Tensor]) -> list[dict[str, tf.Tensor]]:
        """Splits tensors, given by variable path, into each device's parts."""
        per_device = []
        for d, device in enumerate(self.devices):
            named = {}
            for path, whole in tensors.items():
                first = sum(self._size(path, i) for i in range(d))
                with tf.device(device):
                    named[path] = whole[..., first : first + self._size(path, d)]
            per_device.append(named)
        return per_device

    def _size(self, path: str, device_id: int) -> int:
        """Returns the number of channels of a variable on a device."""
        both = (self.variables(device_id, trainable=t) for t in (True, False))
        return next(named[path].shape[-1] for named in both if path in named)

    def whole_variables(self, names: Sequence[str]) -> dict[str, SplitVariable | RepeatedVariable]:
        """Returns name → unsplit view of the variable, in the given order of names."""
        parts: dict[str, list[tf.Variable]] = {name: [] for name in names}
        optimizer_names = [name for name in names if name.startswith("optimizer/")]
        for d, optimizer in enumerate(self.optimizers):
            for trainable in (True, False):
                for path, variable in self.variables(d, trainable=trainable).items():
                    parts[f"model/{path}"].append(variable.value)
            for name, variable in zip(optimizer_names, optimizer.variables, strict=True):
                parts[name].append(variable.value)
        return {
            name: SplitVariable(own, -1) if own[0].shape.rank else RepeatedVariable(own)
            for name, own in parts.items()
        }

    def join(self, parts: Sequence[Sequence[tf.Tensor]], order: Sequence[str]) -> list[tf.Tensor]:
        """Joins the parts of tensors on the first device, in the given order of weights.

        Args:
            parts: for each device, one tensor per weight.
            order: paths of the weights.
        """
        paths = list(self.variables(0, trainable=True))
        with tf.device(self.devices[0]):
            wholes = [tf.concat(of_each, axis=-1) for of_each in zip(*parts, strict=True)]
        named = dict(zip(paths, wholes, strict=True))
        return [named[path] for path in order]

    def split(self, wholes: Sequence[tf.Tensor], order: Sequence[str]) -> list[list[tf.Tensor]]:
        """Splits whole tensors into parts; the inverse of `join`."""
        per_device = self.parts_of(dict(zip(order, wholes, strict=True)))
        paths = list(self.variables(0, trainable=True))
        return [[parts[path] for path in paths] for parts in per_device]
