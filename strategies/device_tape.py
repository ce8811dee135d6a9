"""Differentiates computations that span several devices, by the chain rule.

TensorFlow's tape places the whole backward pass on the device of the scope where `gradient` is
called. Here each device has a small tape for each function, and communication has its own gradient
rule: the backward pass of a gather is a reduce-scatter.
"""

from collections.abc import Callable, Sequence

import tensorflow as tf

from strategies.collectives import add_in_order

# One tensor for each device; None for a device without one.
PerDeviceTensors = list[tf.Tensor | None]


class DeviceTape:
    """Records functions of per-device tensors, and differentiates them.

    The tape tells values apart by the identity of the list that holds them.

    Args:
        devices: T device names.

    Attributes:
        devices: see above.
    """

    def __init__(self, devices: Sequence[str]):
        self.devices = list(devices)
        # For each function call, in order: inputs, output and pullback, which maps the gradients
        # with respect to the output to those with respect to the inputs.
        self._record: list[tuple[Sequence[PerDeviceTensors], PerDeviceTensors, Callable]] = []
        self._weight_gradients: dict = {}

    def copies_of(self, tensor: tf.Tensor) -> PerDeviceTensors:
        """Copies a tensor to every device, without recording it for differentiation."""
        copies = []
        for device in self.devices:
            with tf.device(device):
                copies.append(tf.identity(tensor))
        return copies

    def each(
        self,
        function: Callable[..., tf.Tensor],
        inputs: Sequence[PerDeviceTensors],
        weights: Sequence[Sequence[tf.Tensor]] | None = None,
    ) -> PerDeviceTensors:
        """Calls a function on each device separately.

        Args:
            function: takes the number of a device and the device's tensors of the inputs.
            inputs: values to differentiate with respect to.
            weights: for each device, the other tensors or variables that the function uses.
        """
        weights = weights or [[] for _ in self.devices]
        # A value passed twice has one gradient, not two.
        distinct = list({id(value): value for value in inputs}.values())
        output: PerDeviceTensors = []
        tapes = []
        for d, device in enumerate(self.devices):
            tensors = [value[d] for value in inputs]
            floats = [t for t in tensors if t is not None and t.dtype.is_floating]
            with tf.device(device), tf.GradientTape() as tape:
                tape.watch([*floats, *weights[d]])
                output.append(function(d, *tensors))
            tapes.append(tape)

        def pullback(output_gradients: PerDeviceTensors) -> list[PerDeviceTensors]:
            input_gradients: list[PerDeviceTensors] = [[] for _ in distinct]
            for d, device in enumerate(self.devices):
                sources = [*(value[d] for value in distinct), *weights[d]]
                found = [None] * len(sources)
                if output_gradients[d] is not None:
                    with tf.device(device):
                        found = tapes[d].gradient(
                            output[d], sources, output_gradients=output_gradients[d]
                        )
                for gradients, gradient in zip(input_gradients, found, strict=False):
                    gradients.append(gradient)
                for weight, gradient in zip(weights[d], found[len(distinct) :], strict=True):
                    self._weight_gradients[d, weight.ref()] = gradient
            return input_gradients

        self._record.append((distinct, output, pullback))
        return output

    def gather(self, value: PerDeviceTensors, sizes: Sequence[int]) -> PerDeviceTensors:
        """Joins the parts of a tensor along its last axis, on every device (all-gather).

        Args:
            value: the parts.
            sizes: sizes of the parts along the last axis.
        """
        whole: PerDeviceTensors = []
        for device in self.devices:  # TensorFlow prunes the copies that no device uses.
            with tf.device(device):
                whole.append(tf.concat(value, axis=-1))

        def pullback(whole_gradients: PerDeviceTensors) -> list[PerDeviceTensors]:
            pairs = zip(whole_gradients, self.devices, strict=True)
            sent = [(gradient, device) for gradient, device in pairs if gradient is not None]
            gradients, senders = zip(*sent, strict=True)
            return [self.sum_parts(gradients, sizes, senders)]

        self._record.append(([value], whole, pullback))
        return whole

    def sum_parts(
        self, gradients: Sequence[tf.Tensor], sizes: Sequence[int], senders: Sequence[str]
    ) -> PerDeviceTensors:
        """Sums the gradients of a gathered tensor, and returns to each device its part.

        Every device that used the gathered tensor has a gradient with respect to all of it. The
        gradients are added in the order of the devices (reduce-scatter).

        Args:
            gradients: one per sender.
            sizes: sizes of the parts along the last axis.
            senders: devices that used the gathered tensor.
        """
        per_sender_parts = []
        for gradient, sender in zip(gradients, senders, strict=True):
            with tf.device(sender):  # Split on the source device, so that only the parts are sent.
                per_sender_parts.append(tf.split(gradient, sizes, axis=-1))
        sums: PerDeviceTensors = []
        for d, device in enumerate(self.devices):
            with tf.device(device):
                sums.append(add_in_order([parts[d] for parts in per_sender_parts]))
        return sums

    def gradient(
        self,
        target: PerDeviceTensors,
        target_gradients: PerDeviceTensors,
        weights: Sequence[Sequence[tf.Tensor]],
    ) -> list[list[tf.Tensor]]:
        """Runs the backward pass; returns for each device one gradient per weight.

        Args:
            target: the value to differentiate.
            target_gradients: for each device, the gradient of the loss with respect to `target`.
            weights: for each device, the weights to differentiate with respect to.
        """
        gradients: dict[int, PerDeviceTensors] = {id(target): list(target_gradients)}
        for inputs, output, pullback in reversed(self._record):
            if id(output) not in gradients:
                continue
            for value, found in zip(inputs, pullback(gradients.pop(id(output))), strict=True):
                if id(value) in gradients:
                    found = self._add(gradients[id(value)], found)
                gradients[id(value)] = found
        return [
            [self._weight_gradients[d, weight.ref()] for weight in own]
            for d, own in enumerate(weights)
        ]

    def _add(self, a: PerDeviceTensors, b: PerDeviceTensors) -> PerDeviceTensors:
        """Adds two gradients on each device; a missing one counts as 0."""
        sums: PerDeviceTensors = []
        for device, x, y in zip(self.devices, a, b, strict=True):
            if x is None or y is None:
                sums.append(y if x is None else x)
                continue
            with tf.device(device):
                sums.append(x + y)
        return sums
