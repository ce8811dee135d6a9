"""Represents a model as a list of layer calls, for strategies that split the model."""

import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, TypeVar

import keras
import tensorflow as tf

from strategies.tf_private import layer_nodes

T = TypeVar("T")


class LayerCall(NamedTuple):
    """Represents one call of a layer. Numbered tensors link the calls of a model.

    Attributes:
        layer: the called layer.
        inputs: numbers of the input tensors.
        output: number of the output tensor.
        arguments: (args, kwargs) of the call, with a symbolic tensor for each of `inputs`.
    """

    layer: keras.layers.Layer
    inputs: tuple[int, ...]
    output: int
    arguments: Any

    def __call__(
        self,
        tensors: Iterable[tf.Tensor],
        *,
        training: bool,
        layer: keras.layers.Layer | None = None,
    ) -> tf.Tensor:
        """Calls the layer, or `layer` in its place.

        Args:
            tensors: values of `inputs`, in order.
            training: passed to layers that behave differently in training.
            layer: layer to call instead of `self.layer`.
        """
        layer, values = layer or self.layer, iter(tensors)
        args, kwargs = keras.tree.map_structure(
            lambda x: next(values) if isinstance(x, keras.KerasTensor) else x, self.arguments
        )
        if "training" in inspect.signature(layer.call).parameters:
            kwargs = {**kwargs, "training": training}
        return layer(*args, **kwargs)


class LayerCalls(NamedTuple):
    """Represents a model as its layer calls, in topological order.

    Attributes:
        calls: calls of all layers, including those of nested models.
        input: number of the model's input tensor.
        output: number of the model's output tensor.
    """

    calls: list[LayerCall]
    input: int
    output: int

    @classmethod
    def of(cls, model: keras.Model) -> "LayerCalls":
        """Reads a functional model with one input and one output.

        Raises:
            ValueError: the model is not such a model, or one of its layers returns several tensors
                or is called more than once.
        """
        numbers: dict[int, int] = {}

        def number_of(tensor: keras.KerasTensor) -> int:
            return numbers.setdefault(id(tensor), len(numbers))

        def calls_in(model: keras.Model) -> list[LayerCall]:
            found = []
            for layer, arguments, outputs in layer_nodes(model):
                tensors = [
                    x for x in keras.tree.flatten(arguments) if isinstance(x, keras.KerasTensor)
                ]
                if isinstance(layer, keras.Model):
                    numbers[id(layer.inputs[0])] = number_of(tensors[0])
                    found += calls_in(layer)
                    numbers[id(outputs[0])] = number_of(layer.outputs[0])
                    continue
                if len(outputs) != 1:
                    raise ValueError(f"layer {layer.name} returns {len(outputs)} tensors, not one")
                inputs = tuple(number_of(tensor) for tensor in tensors)
                found.append(LayerCall(layer, inputs, number_of(outputs[0]), arguments))
            return found

        first = number_of(model.inputs[0])
        calls = calls_in(model)
        names = [call.layer.name for call in calls]
        repeated = sorted({name for name in names if names.count(name) > 1})
        if repeated:
            raise ValueError(
                f"model {model.name} calls layer {repeated[0]} more than once; use a strategy that"
                " splits the data alone"
            )
        return cls(calls, first, number_of(model.outputs[0]))


def variables_of(
    calls: Iterable[LayerCall],
) -> tuple[list[keras.Variable], list[keras.Variable]]:
    """Returns the trainable and the non-trainable variables of the called layers."""
    layers = [call.layer for call in calls]
    return (
        [variable for layer in layers for variable in layer.trainable_variables],
        [variable for layer in layers for variable in layer.non_trainable_variables],
    )


def with_values(
    function: Callable[[], T],
    values: Sequence[tuple[keras.Variable, tf.Tensor | tf.Variable]],
) -> T:
    """Calls a function with other values in place of Keras variables.

    Args:
        function: called once.
        values: for each variable, the tensor or variable that replaces it. An assignment goes to
            the replacing variable, and is discarded if the replacement is a tensor.
    """
    if not values:
        return function()
    read = [(variable, tf.convert_to_tensor(value)) for variable, value in values]
    with keras.StatelessScope(read) as scope:
        result = function()
    for (variable, old), (_, place) in zip(read, values, strict=True):
        new = scope.get_current_value(variable)
        if isinstance(place, tf.Variable) and new is not old:
            place.assign(new)
    return result
