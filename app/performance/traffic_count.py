"""Counts the bytes that devices send in a training step, in its traced graph."""

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import tensorflow as tf

from strategies.base import Strategy

_NOT_SENT = {"Const", "Placeholder"}  # Present on every device that needs them.


class UnknownTrafficError(ValueError):
    """The traffic of a strategy is not known; the message says why."""


def count_traffic(strategy: Strategy, batch: Sequence[Any]) -> dict[tuple[int, int], int]:
    """Traces a training step and sums the tensors that are read on another device.

    A tensor counts once for each device that reads it. Operations that affect neither a result nor
    a side effect are pruned by TensorFlow and do not count; nor do images, labels and scalars.

    Returns:
        (sender, receiver), by device number → bytes.

    Raises:
        UnknownTrafficError: the communication is inside of operations.
    """
    iterator = strategy.distribute(tf.data.Dataset.from_tensors(tuple(batch)).repeat())
    graph = tf.function(strategy.train_step).get_concrete_function(iterator).graph
    number_of = {_short(name): number for number, name in enumerate(strategy.devices)}
    places = {
        inner.name: number_of.get(_short(outer.device), 0)
        for outer, inner in graph.captures
        if outer.dtype == tf.resource
    }

    def place(operation: tf.Operation) -> int:
        for tensor in operation.inputs:  # Operations on a variable run on its device.
            if tensor.dtype == tf.resource and tensor.name in places:
                return places[tensor.name]
        return number_of.get(_short(operation.device), 0)

    links: Counter = Counter()
    seen = set()
    for operation in _needed(graph):
        if "Collective" in operation.type or operation.type.startswith("Nccl"):
            raise UnknownTrafficError(
                f"the all-reduce {strategy.algorithm} of {strategy.name} is a single operation"
                f" ({operation.type}): what it sends is not in the graph"
            )
        receiver = place(operation)
        for tensor in operation.inputs:
            sender = place(tensor.op)
            is_number = not tensor.dtype.is_floating or tensor.shape.rank == 0
            is_sent = tensor.op.type not in _NOT_SENT and not is_number
            if sender == receiver or not is_sent or (tensor.name, receiver) in seen:
                continue
            seen.add((tensor.name, receiver))
            if not tensor.shape.is_fully_defined():
                raise UnknownTrafficError(f"{tensor.name} has a shape that only a step knows")
            links[sender, receiver] += tensor.shape.num_elements() * tensor.dtype.size
    return dict(links)


def _needed(graph: tf.Graph) -> Iterator[tf.Operation]:
    """Yields the operations on which results and side effects of a graph depend."""
    waiting = [tensor.op for tensor in graph.outputs] + list(graph.control_outputs)
    seen = set()
    while waiting:
        operation = waiting.pop()
        if operation.name in seen:
            continue
        seen.add(operation.name)
        yield operation
        waiting += [tensor.op for tensor in operation.inputs]
        waiting += operation.control_inputs


def _short(device: str) -> str:
    """Returns type and number of a device of this machine from its full name."""
    return device.rpartition("device:")[2]
