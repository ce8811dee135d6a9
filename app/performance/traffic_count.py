"""Bytes that travel between devices in a training step, counted in its traced graph."""

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from strategies.base import Strategy

# (sender, receiver), by their numbers → bytes.
Links = dict[tuple[int, int], int]

_NOT_SENT = {"Const", "Placeholder"}  # There from the start, on every device that needs them.


class CountedTraffic(NamedTuple):
    """What travels between devices in a step.

    Attributes:
        links: weights, gradients, activations, and the gradients by them.
        inputs: images, labels, and numbers such as losses and counts.
    """

    links: Links
    inputs: Links


class NotCountableError(ValueError):
    """The traffic of a strategy cannot be read from its graph; the text says why."""


def count_traffic(strategy: Strategy, batch: Sequence[Any]) -> CountedTraffic:
    """Traces a training step and adds up the tensors whose reader is on another device.

    A tensor counts once for each device that reads it. What the step does not need does not count:
    an operation on which neither its result nor one of its side effects depends never runs.

    Args:
        strategy: built; it trains nothing.
        batch: images and labels of a global batch.

    Raises:
        NotCountableError: what travels is inside of operations.
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
        for tensor in operation.inputs:  # What reads or writes a variable is where it is.
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
    """Yields the operations that results and side effects of a graph depend on."""
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
    """Returns for each device how many examples of a global batch its replica has."""
    num, rows = strategy.shards_per_replica, []
    for r in range(strategy.num_replicas):
        start, _ = strategy.shard_bounds(num_examples, r * num)
        _, end = strategy.shard_bounds(num_examples, (r + 1) * num - 1)
        rows += [int(end - start)] * strategy.devices_per_replica
    return rows


def _size_bytes(tensor: tf.Tensor, rows: int | None) -> int:
    """Returns the size of a tensor; of the images and labels of a shard only the rows vary."""
    shape = tensor.shape
    if rows is not None and shape.rank and shape[0] is None:
        shape = tf.TensorShape([rows, *shape[1:]])
    if not shape.is_fully_defined():
        raise NotCountableError(f"{tensor.name} has a shape that only a step knows, {shape}")
    return shape.num_elements() * tensor.dtype.size


def _short(device: str) -> str:
    """Returns kind and number of a device of this machine, however its name is written."""
    return device.rpartition("device:")[2]
