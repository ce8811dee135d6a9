"""Computes the bytes that devices send in a training step, by formula.

S is the size of all gradients, R the number of replicas. Each function returns the bytes of every
pair of devices, for comparison with the count in the graph.
"""

import itertools
import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import NamedTuple

import keras
import tensorflow as tf

from app.performance.traffic_count import Links, rows_of_devices
from strategies import ALL_REDUCE_ALGORITHMS
from strategies.base import Strategy
from strategies.channel_parts import SplitCall
from strategies.collectives import shard_sizes
from strategies.layer_calls import LayerCall, LayerCalls, variables_of
from strategies.pipeline import PipelineStrategy
from strategies.sharded import ShardedStrategy
from strategies.tensor import TensorStrategy


class Term(NamedTuple):
    """One kind of traffic.

    Attributes:
        name: what is sent.
        formula: formula of the total bytes, as text.
        links: (sender, receiver) → bytes.
    """

    name: str
    formula: str
    links: Links

    @property
    def size_bytes(self) -> int:
        """The total bytes."""
        return sum(self.links.values())


class NoFormulaError(ValueError):
    """The traffic of a strategy is unknown; the message says why."""


def terms_of(strategy: Strategy, num_examples: int) -> list[Term]:
    """Returns the traffic of a step of a strategy.

    Args:
        strategy: a built strategy.
        num_examples: examples of the global batch.

    Raises:
        NoFormulaError: its all-reduce is implemented in TensorFlow.
    """
    model, num_replicas = strategy.model, strategy.num_replicas
    rows = rows_of_devices(strategy, num_examples)[:: strategy.devices_per_replica]
    weights = [tf.TensorSpec(v.shape, v.dtype) for v in model.trainable_variables]
    if isinstance(strategy, PipelineStrategy):
        return pipeline_terms([stage.calls for stage in strategy.pipelines[0].stages], rows)
    if isinstance(strategy, TensorStrategy):
        return tensor_terms(strategy.rows[0].calls, rows)
    calls = LayerCalls.of(model).calls if strategy.syncs_batch_norm else []
    if isinstance(strategy, ShardedStrategy):
        sizes = [weight.shape.num_elements() for weight in weights]
        kept = "weights" if strategy.splits_weights else "gradients"
        kept = kept if strategy.splits_gradients else "optimizer"
        return [*sharded_terms(sizes, num_replicas, kept), *sync_terms(calls, num_replicas)]
    if strategy.name not in ALL_REDUCE_ALGORITHMS and strategy.num_devices > 1:
        raise NoFormulaError(f"there is no formula for the strategy {strategy.name}")
    if num_replicas == 1 or strategy.algorithm == "none":
        return []
    if calls and strategy.name == "mirrored":
        raise NoFormulaError("Keras computes BatchNorm over all replicas, in its own way")
    buckets = strategy.gradient_buckets(weights)
    size_bytes = buckets.size_bytes // sum(weight.shape.num_elements() for weight in weights)
    sizes = [
        sum(weights[position].shape.num_elements() for position in bucket)
        for bucket in buckets.buckets
    ]
    devices = range(num_replicas)
    return [
        all_reduce_term(sizes, devices, strategy.algorithm, itemsize=size_bytes),
        *sync_terms(calls, num_replicas),
    ]


def all_reduce_term(
    sizes: Sequence[int], devices: Sequence[int], algorithm: str, *, itemsize: int = 4
) -> Term:
    """Returns the traffic of an all-reduce of the gradients.

    Args:
        sizes: number of elements of each tensor.
        devices: numbers of the R devices.
        algorithm: name of the algorithm.
        itemsize: bytes per element.

    Raises:
        NoFormulaError: the algorithm is not one of `manual`.
    """
    if algorithm not in _ALL_REDUCES:
        raise NoFormulaError(f"what the all-reduce {algorithm} sends is TensorFlow's choice")
    links: Counter = Counter()
    for sender, receiver, parts in _ALL_REDUCES[algorithm](len(devices)):
        sent = sum(_part_size(size, len(devices), parts) for size in sizes)
        links[devices[sender], devices[receiver]] += sent * itemsize
    return Term(f"all-reduce of the gradients, {algorithm}", "2 (R − 1) S", _without_zeros(links))


def sharded_terms(sizes: Sequence[int], num_replicas: int, shard: str) -> list[Term]:
    """Returns the traffic of `sharded`.

    Args:
        sizes: number of elements of each weight.
        num_replicas: R.
        shard: what is split; see `sharded`.
    """
    devices = range(num_replicas)
    parts = [4 * sum(shard_sizes(size, num_replicas)[r] for size in sizes) for r in devices]
    pairs = list(itertools.permutations(devices, 2))
    gather = Term("all-gather of the weights", "(R − 1) S", {(r, s): parts[r] for r, s in pairs})
    if shard == "optimizer":
        return [all_reduce_term(sizes, devices, "reduce_to_one"), gather]
    links = {(r, s): parts[s] for r, s in pairs}
    return [gather, Term("reduce-scatter of the gradients", "(R − 1) S", links)]


def pipeline_terms(stages: Sequence[Sequence[LayerCall]], rows: Sequence[int]) -> list[Term]:
    """Returns the traffic of `pipeline`.

    Args:
        stages: layer calls of each stage.
        rows: number of examples of each replica.
    """
    there: Links = {}
    back: Links = {}
    num_stages = len(stages)
    for r, num_examples in enumerate(rows):
        for k, calls in enumerate(stages[:-1]):
            device = r * num_stages + k
            there[device, device + 1] = num_examples * activation_bytes(calls[-1])
            back[device + 1, device] = there[device, device + 1]
    sizes = [_sizes(variables_of(calls)[0]) for calls in stages]
    return [
        Term("activations at the cuts", "images · bytes at each cut", there),
        Term("gradients by them, back", "images · bytes at each cut", back),
        *_column_terms(sizes, len(rows), "of each stage"),
    ]


def tensor_terms(calls: Sequence[SplitCall], rows: Sequence[int]) -> list[Term]:
    """Returns the traffic of `tensor`.

    Args:
        calls: the split layer calls.
        rows: number of examples of each replica.
    """
    num_parts = len(calls[0].layers)
    producers = {split.call.output: split for split in calls}
    trained: dict[int, bool] = {}
    gathered: dict[int, range] = {}  # Number of a tensor → the devices that gather it.
    for split in calls:
        call = split.call
        trained[call.output] = bool(call.layer.trainable_variables) or any(
            trained.get(i, False) for i in call.inputs
        )
        if split.gathers:
            gathered |= {i: range(num_parts) for i in call.inputs if i in producers}
    output = calls[-1].call.output
    gathered.setdefault(output, range(1))  # The logits, for the loss.
    there: Counter = Counter()
    back: Counter = Counter()
    for number, receivers in gathered.items():
        split = producers[number]
        if not split.sizes:
            continue
        channel_bytes = activation_bytes(split.call) // sum(split.sizes)
        for r, d, e in itertools.product(range(len(rows)), range(num_parts), receivers):
            if d != e:
                sender, receiver = r * num_parts + d, r * num_parts + e
                sent = rows[r] * channel_bytes * split.sizes[d]
                there[sender, receiver] += sent
                back[receiver, sender] += sent * trained[number]
    sizes = [
        [size for split in calls for size in _sizes(split.layers[d].trainable_variables)]
        for d in range(num_parts)
    ]
    every = "images · (T − 1) · bytes of each gathered tensor"
    return [
        Term("all-gather of activations", every, _without_zeros(there)),
        Term("reduce-scatter of their gradients", every, _without_zeros(back)),
        *_column_terms(sizes, len(rows), "of each device's part"),
    ]


def sync_terms(calls: Sequence[LayerCall], num_replicas: int) -> list[Term]:
    """Returns the traffic of synchronised BatchNorm: count, mean and squares of each channel.

    Args:
        calls: layer calls; empty if each shard is normalised separately.
        num_replicas: R.
    """
    trained: dict[int, bool] = {}
    size_bytes = 0
    for call in calls:
        before = any(trained.get(i, False) for i in call.inputs)
        trained[call.output] = before or bool(call.layer.trainable_variables)
        if isinstance(call.layer, keras.layers.BatchNormalization) and call.layer.trainable:
            size_bytes += (1 + before) * 3 * 4 * call.layer.moving_mean.shape[0]
    if not size_bytes:
        return []
    links = dict.fromkeys(itertools.permutations(range(num_replicas), 2), size_bytes)
    text = "R (R − 1) · 24 bytes a channel"
    return [Term("BatchNorm statistics, and back", text, links)]


def activation_bytes(call: LayerCall) -> int:
    """Returns the bytes of a layer's output for one example."""
    elements = math.prod(call.layer.output.shape[1:])
    return elements * tf.as_dtype(call.layer.compute_dtype).size


def _column_terms(per_device_sizes: Sequence[Sequence[int]], num_replicas: int, of: str) -> list:
    """Returns the all-reduces over replicas of the weights of each device of a replica."""
    if num_replicas == 1:
        return []
    num_parts = len(per_device_sizes)
    links: Links = {}
    for d, sizes in enumerate(per_device_sizes):
        column = [r * num_parts + d for r in range(num_replicas)]
        links |= all_reduce_term(sizes, column, "reduce_to_one").links
    return [Term(f"all-reduce of the gradients {of}", "2 (R − 1) S", links)]


def _sizes(variables: Sequence[keras.Variable]) -> list[int]:
    return [math.prod(variable.shape) for variable in variables]


def _part_size(size: int, num_parts: int, part: int | None) -> int:
    return size if part is None else shard_sizes(size, num_parts)[part]


def _without_zeros(links: Counter) -> Links:
    return {link: size for link, size in links.items() if size}


# Sender, receiver, and the part of each tensor; None for the whole.
Messages = Sequence[tuple[int, int, int | None]]


def _reduce_to_one(num: int) -> Messages:
    others = range(1, num)
    return [(r, 0, None) for r in others] + [(0, r, None) for r in others]


def _ring(num: int) -> Messages:
    steps = itertools.product(range(1, num), range(num))
    both = [((r - step) % num, (r + 1 - step) % num, r) for step, r in steps]
    return [((r - 1) % num, r, part) for adds, hands_on, r in both for part in (adds, hands_on)]


def _direct(num: int) -> Messages:
    pairs = list(itertools.permutations(range(num), 2))
    return [(r, s, s) for r, s in pairs] + [(r, s, r) for r, s in pairs]


def _tree(num: int) -> Messages:
    messages: list[tuple[int, int, int | None]] = []
    for distance in [2**i for i in range((num - 1).bit_length())]:
        for r in range(0, num - distance, 2 * distance):
            messages += [(r + distance, r, None), (r, r + distance, None)]
    return messages


_ALL_REDUCES: dict[str, Callable[[int], Messages]] = {
    "reduce_to_one": _reduce_to_one,
    "tree": _tree,
    "ring": _ring,
    "direct": _direct,
}
