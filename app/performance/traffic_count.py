"""Counts the bytes that devices send in a training step, in its traced graph."""

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from strategies.base import Strategy

# (sender, receiver), by device number → bytes.
Links = dict[tuple[int, int], int]

_NOT_SENT = {"Const", "Placeholder"}  # Present on every device that needs them.


class CountedTraffic(NamedTuple):
    """Bytes sent between devices in a step.

    Attributes:
        links: bytes of weights, gradients, activations and their gradients.
        inputs: bytes of images, labels, and numbers such as losses and counts.
    """

    links: Links
    inputs: Links


class NotCountableError(ValueError):
    """The traffic of a strategy cannot be read from its graph; the message says why."""


def count_traffic(strategy: Strategy, batch: Sequence[Any]) -> CountedTraffic:
    """Traces a training step and sums the tensors that are read on another device.

    A tensor counts once for each device that reads it. Operations that affect neither a result nor
    a side effect are pruned by TensorFlow and do not count.

    Args:
        strategy: a built strategy; it is not trained.
        batch: images and labels of a global batch.

    Raises:
        NotCountableError: the communication is inside of operations.
    """
    dataset = tf.data.Dataset.from_tensors(tuple(batch)).repeat()
    iterator = strategy.distribute(dataset)
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

    per_device_rows = rows_of_devices(strategy, len(batch[0]))
    links: Counter = Counter()
    inputs: Counter = Counter()
    seen = set()
    for operation in _needed(graph):
        if "Collective" in operation.type or operation.type.startswith("Nccl"):
            raise NotCountableError(
                f"the all-reduce {strategy.algorithm} of {strategy.name} is a single operation"
                f" ({operation.type}): what it sends is not in the graph"
            )
        receiver = place(operation)
        for tensor in operation.inputs:
            sender = place(tensor.op)
            is_sent = tensor.op.type not in _NOT_SENT and tensor.dtype != tf.resource
            if sender == receiver or not is_sent or (tensor.name, receiver) in seen:
                continue
            seen.add((tensor.name, receiver))
            is_input = not tensor.dtype.is_floating or tensor.shape.rank == 0
            size_bytes = _size_bytes(tensor, per_device_rows[receiver] if is_input else None)
            (inputs if is_input else links)[sender, receiver] += size_bytes
    return CountedTraffic(dict(links), dict(inputs))


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


def rows_of_devices(strategy: Strategy, num_examples: int) -> list[int]:
    """Returns for each device the number of examples of its replica."""
    num, rows = strategy.shards_per_replica, []
    for r in range(strategy.num_replicas):
        start, _ = strategy.shard_bounds(num_examples, r * num)
        _, end = strategy.shard_bounds(num_examples, (r + 1) * num - 1)
        rows += [int(end - start)] * strategy.devices_per_replica
    return rows


def _size_bytes(tensor: tf.Tensor, rows: int | None) -> int:
    """Returns the size of a tensor; only the rows of a shard's images and labels vary."""
    shape = tensor.shape
    if rows is not None and shape.rank and shape[0] is None:
        shape = tf.TensorShape([rows, *shape[1:]])
    if not shape.is_fully_defined():
        raise NotCountableError(f"{tensor.name} has a shape that only a step knows, {shape}")
    return shape.num_elements() * tensor.dtype.size


def _short(device: str) -> str:
    """Returns type and number of a device of this machine from its full name."""
    return device.rpartition("device:")[2]
