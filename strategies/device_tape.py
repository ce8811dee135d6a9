"""Differentiates computations that span several devices, by the chain rule.

TensorFlow's tape places the whole backward pass on the device of the scope where `gradient` is
called. Here each device has a small tape for each function, and communication has its own gradient
rule: the backward pass of a gather is a reduce-scatter.
"""

from collections.abc import Callable, Iterable, Sequence

import tensorflow as tf

from strategies.gather_scatter import all_gather, reduce_scatter


class Spread:
    """Holds one tensor per device.

    Args:
        tensors: tensors in order of devices; None for a device without one.
    """

    def __init__(self, tensors: Iterable[tf.Tensor | None]):
        self.tensors = list(tensors)


class DeviceTape:
    """Records functions of spread values, and differentiates them.

    Args:
        devices: T device names.

    Attributes:
        devices: see above.
    """

    def __init__(self, devices: Sequence[str]):
        self.devices = list(devices)
        # For each function call, in order: inputs, output and pullback, which maps the gradients
        # with respect to the output to those with respect to the inputs.
        self._record: list[tuple[Sequence[Spread], Spread, Callable]] = []
        self._weight_gradients: dict = {}

    def copies_of(self, tensor: tf.Tensor) -> Spread:
        """Copies a tensor to every device, without recording it for differentiation."""
        copies = []
        for device in self.devices:
            with tf.device(device):
                copies.append(tf.identity(tensor))
        return Spread(copies)

    def each(
        self,
        function: Callable[..., tf.Tensor],
        inputs: Sequence[Spread],
        weights: Sequence[Sequence[tf.Tensor]] | None = None,
    ) -> Spread:
        """Calls a function on each device separately.

        Args:
            function: takes the number of a device and the device's tensors of the inputs.
            inputs: values to differentiate with respect to.
            weights: for each device, the other tensors or variables that the function uses.
        """
        weights = weights or [[] for _ in self.devices]
        # A value passed twice has one gradient, not two.
        distinct = list({id(value): value for value in inputs}.values())
        outputs: list[tf.Tensor | None] = []
        tapes = []
        for d, device in enumerate(self.devices):
            tensors = [value.tensors[d] for value in inputs]
            floats = [t for t in tensors if t is not None and t.dtype.is_floating]
            with tf.device(device), tf.GradientTape() as tape:
                tape.watch([*floats, *weights[d]])
                outputs.append(function(d, *tensors))
            tapes.append(tape)

        def pullback(output_gradients: Sequence[tf.Tensor | None]) -> list[list]:
            input_gradients: list[list[tf.Tensor | None]] = [[] for _ in distinct]
            for d, device in enumerate(self.devices):
                tensors = [value.tensors[d] for value in distinct]
                sources = [*tensors, *weights[d]]
                found = [None] * len(sources)
                if output_gradients[d] is not None:
                    with tf.device(device):
                        found = tapes[d].gradient(
                            outputs[d], sources, output_gradients=output_gradients[d]
                        )
                for gradients, gradient in zip(input_gradients, found, strict=False):
                    gradients.append(gradient)
                for weight, gradient in zip(weights[d], found[len(tensors) :], strict=True):
                    self._weight_gradients[d, weight.ref()] = gradient
            return input_gradients

        output = Spread(outputs)
        self._record.append((distinct, output, pullback))
        return output

    def gather(self, value: Spread, sizes: Sequence[int], *, first_alone: bool = False) -> Spread:
        """Joins the parts of a tensor along its last axis, on every device.

        Args:
            value: the parts.
            sizes: sizes of the parts along the last axis.
            first_alone: join the parts only on the first device.
        """
        receivers = self.devices[:1] if first_alone else self.devices
        wholes = all_gather(value.tensors, receivers, axis=-1)
        none = [None] * (len(self.devices) - len(receivers))

        def pullback(output_gradients: Sequence[tf.Tensor | None]) -> list[list]:
            pairs = zip(output_gradients, self.devices, strict=True)
            sent = [(gradient, device) for gradient, device in pairs if gradient is not None]
            gradients, senders = zip(*sent, strict=True)
            return [self.sum_parts(gradients, sizes, senders)]

        whole = Spread([*wholes, *none])
        self._record.append(([value], whole, pullback))
        return whole

    def sum_parts(
        self, gradients: Sequence[tf.Tensor], sizes: Sequence[int], senders: Sequence[str]
    ) -> list[tf.Tensor]:
        """Sums the gradients of a gathered tensor, and returns to each device its part.

        Every device that used the gathered tensor has a gradient with respect to all of it.

        Args:
            gradients: one per sender.
            sizes: sizes of the parts along the last axis.
            senders: devices that used the gathered tensor.
        """
        return reduce_scatter(gradients, sizes, senders, receivers=self.devices, axis=-1)

    def gradient(
        self,
        target: Spread,
        target_gradients: Sequence[tf.Tensor | None],
        weights: Sequence[Sequence[tf.Tensor]],
    ) -> list[list[tf.Tensor]]:
        """Runs the backward pass; returns for each device one gradient per weight.

        Args:
            target: the value to differentiate.
            target_gradients: for each device, the gradient of the loss with respect to `target`.
            weights: for each device, the weights to differentiate with respect to.
        """
        self.input_gradients(target, target_gradients, [])
        return [
            [self._weight_gradients[d, weight.ref()] for weight in own]
            for d, own in enumerate(weights)
        ]

    def input_gradients(
        self,
        target: Spread,
        target_gradients: Sequence[tf.Tensor | None],
        sources: Sequence[Spread],
    ) -> list[list[tf.Tensor | None]]:
        """Returns the gradients with respect to values, for each device; see `gradient`."""
        gradients: dict[int, list] = {id(target): list(target_gradients)}
        for inputs, output, pullback in reversed(self._record):
            if id(output) not in gradients:
                continue
            for value, own in zip(inputs, pullback(gradients.pop(id(output))), strict=True):
                so_far = gradients.get(id(value), [None] * len(own))
                gradients[id(value)] = self._add(so_far, own)
        return [gradients[id(source)] for source in sources]

    def _add(self, a: Sequence[tf.Tensor | None], b: Sequence[tf.Tensor | None]) -> list:
        """Adds two gradients on each device; a missing one counts as 0."""
        sums = []
        for device, x, y in zip(self.devices, a, b, strict=True):
            if x is None or y is None:
                sums.append(y if x is None else x)
                continue
            with tf.device(device):
                sums.append(x + y)
        return sums
