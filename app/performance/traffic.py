"""Counts the bytes that devices send in a training step, in its traced graph."""

import dataclasses
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from app.report.result import Block, Table

if TYPE_CHECKING:  # Not imported before its devices are set up.
    import tensorflow as tf

    from strategies.base import Strategy

_NOT_SENT = {"Const", "Placeholder"}  # Present on every device that needs them.


@dataclasses.dataclass(frozen=True)
class Traffic:
    """Bytes of weights, gradients, activations and their gradients between devices in a step.

    Attributes:
        links: sender, receiver and bytes of each connection, by device number.
        note: why they cannot be counted; "" if they can.
    """

    links: list[tuple[int, int, int]]
    note: str = ""

    def describe(self, name: str) -> list[Block]:
        """Returns the table for the output; `name` is that of the case."""
        if self.note or not self.links:
            sent = f"not counted: {self.note}" if self.note else "none"
            return [f"bytes between devices in a step of {name}: {sent}"]
        rows = [[f"{sender} → {receiver}", f"{size:,}"] for sender, receiver, size in self.links]
        rows.append(["in all", f"{sum(size for *_, size in self.links):,}"])
        return [Table(f"bytes between devices in a step of {name}", ["devices", "bytes"], rows)]


def count_traffic(strategy: "Strategy", batch: Sequence[Any]) -> Traffic:
    """Traces a training step and sums the tensors that are read on another device.

    A tensor counts once for each device that reads it. Operations that affect neither a result nor
    a side effect are pruned by TensorFlow and do not count; nor do images, labels and scalars.

    Args:
        strategy: a built strategy; it is not trained.
        batch: images and labels of a global batch.
    """
    import tensorflow as tf

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

    sizes: Counter = Counter()
    seen = set()
    for operation in _needed(graph):
        if "Collective" in operation.type or operation.type.startswith("Nccl"):
            note = (
                f"the all-reduce {strategy.algorithm} of {strategy.name} is a single operation"
                f" ({operation.type}), and what it sends is not in the graph"
            )
            return Traffic([], note)
        receiver = place(operation)
        for tensor in operation.inputs:
            sender = place(tensor.op)
            is_number = not tensor.dtype.is_floating or tensor.shape.rank == 0
            is_sent = tensor.op.type not in _NOT_SENT and not is_number
            if sender == receiver or not is_sent or (tensor.name, receiver) in seen:
                continue
            seen.add((tensor.name, receiver))
            if not tensor.shape.is_fully_defined():
                return Traffic([], f"{tensor.name} has a shape that only a step knows")
            sizes[sender, receiver] += tensor.shape.num_elements() * tensor.dtype.size
    return Traffic([(*link, size) for link, size in sorted(sizes.items())])


def _needed(graph: "tf.Graph") -> Iterator["tf.Operation"]:
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
