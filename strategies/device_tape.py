"""Differentiates what several devices compute together, by the chain rule.

TensorFlow's tape places all of a backward pass on the device of the scope in which it is asked for.
Here every device has a small tape for each function, and what travels between devices has its own
rule: the backward pass of a gather is a reduce-scatter.
"""

from collections.abc import Callable, Iterable, Sequence

import tensorflow as tf

from strategies.gather_scatter import all_gather, reduce_scatter
from strategies.observer import Observer


class Spread:
    """A value of which each device holds a tensor.

    Args:
        tensors: of the devices, in their order; None where a device has none.
    """

    def __init__(self, tensors: Iterable[tf.Tensor | None]):
        self.tensors = list(tensors)


class DeviceTape:
    """Records functions of spread values, and differentiates them.

    Args:
        devices: T device names.
        observer: told what is added in the backward pass.
    """

    def __init__(self, devices: Sequence[str], observer: Observer):
        self._devices, self._observer = list(devices), observer
        # Of each function, in the order of the calls: its inputs, its output and its pullback,
        # which turns the gradients by the output into those by the inputs.
        self._record: list[tuple[Sequence[Spread], Spread, Callable]] = []
        self._weight_gradients: dict = {}

    def copies_of(self, tensor: tf.Tensor) -> Spread:
        """Copies a tensor to every device, to be used but not to be differentiated by."""
        copies = []
        for device in self._devices:
            with tf.device(device):
                copies.append(tf.identity(tensor))
        return Spread(copies)

    def each(
        self,
        function: Callable[..., tf.Tensor],
        inputs: Sequence[Spread],
        weights: Sequence[Sequence[tf.Tensor]] | None = None,
    ) -> Spread:
        """Calls a function on each device by itself.

        Args:
            function: of the number of the device and its tensors of the inputs.
            inputs: values that the function is differentiated by.
            weights: for each device, tensors or variables that it uses besides.
        """
        weights = weights or [[] for _ in self._devices]
        # A value that the function takes twice has one gradient, not two.
        distinct = list({id(value): value for value in inputs}.values())
        outputs: list[tf.Tensor | None] = []
        tapes = []
        for d, device in enumerate(self._devices):
            tensors = [value.tensors[d] for value in inputs]
            with tf.device(device), tf.GradientTape() as tape:
                tape.watch(
                    [*(t for t in tensors if t is not None and t.dtype.is_floating), *weights[d]]
                )
                outputs.append(function(d, *tensors))
            tapes.append(tape)

        def pullback(output_gradients: Sequence[tf.Tensor | None]) -> list[list]:
            input_gradients: list[list[tf.Tensor | None]] = [[] for _ in distinct]
            for d, device in enumerate(self._devices):
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

        return self._recorded(distinct, Spread(outputs), pullback)

    def gather(self, value: Spread, sizes: Sequence[int], *, first_alone: bool = False) -> Spread:
        """Joins the parts of a tensor along its last axis, on every device.

        Args:
            value: the parts.
            sizes: of the parts.
            first_alone: join them on the first device alone.
        """
        receivers = self._devices[:1] if first_alone else self._devices
        wholes = all_gather(value.tensors, receivers, axis=-1)
        none = [None] * (len(self._devices) - len(receivers))

        def pullback(output_gradients: Sequence[tf.Tensor | None]) -> list[list]:
            sent = [g for g in output_gradients if g is not None]
            senders = [
                device
                for device, g in zip(self._devices, output_gradients, strict=True)
                if g is not None
            ]
            return [
                reduce_scatter(
                    sent,
                    sizes,
                    senders,
                    receivers=self._devices,
                    axis=-1,
                    on_pieces=self._observer.on_pieces,
                )
            ]

        return self._recorded([value], Spread([*wholes, *none]), pullback)

    def gradient(
        self,
        target: Spread,
        target_gradients: Sequence[tf.Tensor | None],
        weights: Sequence[Sequence[tf.Tensor]],
    ) -> list[list[tf.Tensor]]:
        """Goes back from the last function to the first one.

        Args:
            target: what is differentiated.
            target_gradients: of the loss by it, for each device.
            weights: for each device, what it is differentiated by.

        Returns:
            For each device, a gradient for each of its weights.
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
        """Returns the gradients by values, for each device; see `gradient`."""
        gradients: dict[int, list] = {id(target): list(target_gradients)}
        for inputs, output, pullback in reversed(self._record):
            if id(output) not in gradients:
                continue
            for value, own in zip(inputs, pullback(gradients.pop(id(output))), strict=True):
                so_far = gradients.get(id(value), [None] * len(own))
                gradients[id(value)] = self._add(so_far, own)
        return [gradients[id(source)] for source in sources]

    def _recorded(self, inputs: Sequence[Spread], output: Spread, pullback: Callable) -> Spread:
        self._record.append((inputs, output, pullback))
        return output

    def _add(self, a: Sequence[tf.Tensor | None], b: Sequence[tf.Tensor | None]) -> list:
        """Adds two gradients on each device; a missing one counts as 0."""
        sums = []
        for device, x, y in zip(self._devices, a, b, strict=True):
            with tf.device(device):
                sums.append(x + y if x is not None and y is not None else y if x is None else x)
        return sums
