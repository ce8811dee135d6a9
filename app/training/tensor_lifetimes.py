"""Computes the peak memory of a training step from the lifetimes of its tensors."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from strategies.layer_calls import LayerCall, run, variables_of, with_values
from strategies.loss import shard_loss

# Not a dimension of a network: dimensions that it divides depend on the images of a shard.
_NUM_IMAGES = 97
# Kernels that return their input's memory. (Kernels that may overwrite an unused input save almost
# nothing: oneDNN's do not, or not at the peak.)
_VIEWS = {"ExpandDims", "Identity", "ReadVariableOp", "Reshape", "Squeeze", "StopGradient"}
_GIVEN = {"Const", "Placeholder"}  # Weights and the batch, in memory all the time.


class LiveTensors(NamedTuple):
    """Bytes of the tensors that are alive at the peak of a step.

    Attributes:
        fixed_bytes: bytes independent of the shard, mostly gradients.
        image_bytes: bytes per image of a shard.
    """

    fixed_bytes: int
    image_bytes: float


def live_tensors_in_step(model: keras.Model) -> LiveTensors:
    """Traces loss and gradient of a shard and computes the peak, without running the step.

    A tensor is alive from the operation that creates it to the last one that reads it; gradients
    are alive until the end. Operations run in the order of tracing.

    Args:
        model: a model for uint8 images `(n, height, width, channels)`; not changed. Its variables
            need no values.
    """

    def gradients_of(
        images: tf.Tensor, labels: tf.Tensor, weights: list[tf.Tensor], others: list[tf.Tensor]
    ) -> list[tf.Tensor]:
        with tf.GradientTape() as tape:
            tape.watch(weights)
            logits, _ = model.stateless_call(weights, others, images, training=True)
            loss, _ = shard_loss(logits, labels, tf.size(labels))
        return tape.gradient(loss, weights)

    return _live_tensors(
        gradients_of,
        tf.TensorSpec((_NUM_IMAGES, *model.input_shape[1:]), tf.uint8),
        tf.TensorSpec((_NUM_IMAGES,), tf.int32),
        _specs(model.trainable_variables),
        _specs(model.non_trainable_variables),
    )


def live_tensors_in_stage(calls: Sequence[LayerCall]) -> LiveTensors:
    """Computes the peak of a part of a model; see `live_tensors_in_step`.

    Args:
        calls: consecutive layer calls with a single input tensor and a single output tensor.
    """
    trainable, others = variables_of(calls)
    symbolic = next(
        x for x in keras.tree.flatten(calls[0].arguments) if isinstance(x, keras.KerasTensor)
    )
    inputs, outputs = (
        tf.TensorSpec((_NUM_IMAGES, *tensor.shape[1:]), tensor.dtype)
        for tensor in (symbolic, calls[-1].layer.output)
    )

    def gradients_of(
        x: tf.Tensor, output_gradients: tf.Tensor, weights: list[tf.Tensor], own: list[tf.Tensor]
    ) -> list[tf.Tensor]:
        sources = [*([x] if x.dtype.is_floating else []), *weights]
        values = [*zip(trainable, weights, strict=True), *zip(others, own, strict=True)]
        with tf.GradientTape() as tape:
            tape.watch(sources)
            y = with_values(
                lambda: run(calls, {calls[0].inputs[0]: x}, training=True)[calls[-1].output], values
            )
        return tape.gradient(y, sources, output_gradients=output_gradients)

    return _live_tensors(gradients_of, inputs, outputs, _specs(trainable), _specs(others))


def _live_tensors(function: Callable[..., Any], *specs: Any) -> LiveTensors:
    return _split(_largest_set(tf.function(function).get_concrete_function(*specs).graph))


def _specs(variables: Iterable[keras.Variable]) -> list[tf.TensorSpec]:
    return [tf.TensorSpec(variable.shape, variable.dtype) for variable in variables]


def _largest_set(graph: tf.Graph) -> list[tf.Tensor]:
    """Returns the tensors that are alive at the peak."""
    operations = graph.get_operations()
    owner = _owners(operations)
    last_use = {}
    for position, operation in enumerate(operations):
        for tensor in operation.inputs:
            last_use[owner[tensor.ref()]] = position
    last_use |= {owner[tensor.ref()]: len(operations) for tensor in graph.outputs}

    alive, size, largest, most = {}, 0, [], 0
    for position, operation in enumerate(operations):
        if operation.type in _GIVEN:
            continue
        for tensor in operation.outputs:
            if owner[tensor.ref()] == tensor.ref() and _size_bytes(tensor):
                alive[tensor.ref()] = tensor
                size += _size_bytes(tensor)
        if size > most:
            largest, most = list(alive.values()), size
        for ref in [ref for ref in alive if last_use.get(ref, position) <= position]:
            size -= _size_bytes(alive.pop(ref))
    return largest


def _owners(operations: Iterable) -> dict:
    """Returns tensor → the tensor whose memory it uses."""
    owner: dict[Any, Any] = {}  # By reference: tensors are not hashable.
    for operation in operations:
        for tensor in operation.outputs:
            is_view = operation.type in _VIEWS and len(operation.inputs) > 0
            owner[tensor.ref()] = owner[operation.inputs[0].ref()] if is_view else tensor.ref()
    return owner


def _split(tensors: Iterable[tf.Tensor]) -> LiveTensors:
    fixed_bytes, image_bytes = 0, 0.0
    for tensor in tensors:
        if tensor.shape.num_elements() % _NUM_IMAGES == 0:
            image_bytes += _size_bytes(tensor) / _NUM_IMAGES
        else:
            fixed_bytes += _size_bytes(tensor)
    return LiveTensors(fixed_bytes, image_bytes)


def _size_bytes(tensor: tf.Tensor) -> int:
    if tensor.dtype in (tf.resource, tf.variant) or not tensor.shape.is_fully_defined():
        return 0
    return tensor.shape.num_elements() * tensor.dtype.size
