"""Computes the bytes that devices send in a training step, by formula.

S is the size of all gradients, R the number of replicas, T the number of devices of a replica.
"""

import math
from collections.abc import Sequence

import tensorflow as tf

from app.performance.traffic_count import UnknownTrafficError
from strategies import ALL_REDUCE_ALGORITHMS
from strategies.base import Strategy
from strategies.channel_parts import SplitCall
from strategies.layer_calls import LayerCall
from strategies.pipeline import PipelineStrategy
from strategies.sharded import ShardedStrategy
from strategies.tensor import TensorStrategy

Term = tuple[str, str, int]  # What is sent, the formula as text, bytes.

_OWN_ALGORITHMS = ALL_REDUCE_ALGORITHMS["manual"]


def terms_of(strategy: Strategy, num_examples: int) -> list[Term]:
    """Returns the traffic of a step of a strategy.

    Args:
        strategy: a built strategy.
        num_examples: examples of the global batch.

    Raises:
        UnknownTrafficError: its all-reduce is implemented in TensorFlow.
    """
    model, num_replicas = strategy.model, strategy.num_replicas
    size = sum(4 * math.prod(weight.shape) for weight in model.trainable_variables)
    if isinstance(strategy, PipelineStrategy):
        stages = strategy.pipelines[0].stages
        cut = num_examples * sum(activation_bytes(stage.calls[-1]) for stage in stages[:-1])
        name = "activations at the cuts, and their gradients"
        sent = [(name, "2 · images · bytes at each cut", 2 * cut)]
        return sent + _all_reduce("of each stage", size, num_replicas)
    if isinstance(strategy, TensorStrategy):
        sent = [_tensor_term(strategy.rows[0].calls, num_examples)]
        return sent + _all_reduce("of each part", size, num_replicas)
    if strategy.syncs_batch_norm:
        raise UnknownTrafficError("there is no formula for synchronised BatchNorm")
    if isinstance(strategy, ShardedStrategy):
        once = (num_replicas - 1) * size
        sent = [("all-gather of the weights", "(R − 1) S", once)]
        if strategy.splits_gradients:
            sent.append(("reduce-scatter of the gradients", "(R − 1) S", once))
        else:
            sent += _all_reduce("reduce_to_one", size, num_replicas)
        return sent
    if strategy.name not in ALL_REDUCE_ALGORITHMS and strategy.num_devices > 1:
        raise UnknownTrafficError(f"there is no formula for the strategy {strategy.name}")
    if num_replicas == 1 or strategy.algorithm == "none":
        return []
    if strategy.algorithm not in _OWN_ALGORITHMS:
        raise UnknownTrafficError(
            f"what the all-reduce {strategy.algorithm} sends is TensorFlow's choice"
        )
    weights = [tf.TensorSpec(v.shape, v.dtype) for v in model.trainable_variables]
    size = strategy.gradient_buckets(weights).size_bytes
    return _all_reduce(strategy.algorithm, size, num_replicas)


def activation_bytes(call: LayerCall) -> int:
    """Returns the bytes of a layer's output for one example."""
    elements = math.prod(call.layer.output.shape[1:])
    return elements * tf.as_dtype(call.layer.compute_dtype).size


def _all_reduce(what: str, size_bytes: int, num_replicas: int) -> list[Term]:
    """Returns the traffic of an all-reduce, which is the same for each of our algorithms."""
    if num_replicas == 1:
        return []
    sent = 2 * (num_replicas - 1) * size_bytes
    return [(f"all-reduce of the gradients, {what}", "2 (R − 1) S", sent)]


def _tensor_term(calls: Sequence[SplitCall], num_examples: int) -> Term:
    """Returns the gathered activations of `tensor`, and the gradients of those that have any."""
    num_parts = len(calls[0].layers)
    producers = {split.call.output: split for split in calls}
    trained = _trained([split.call for split in calls])
    gathered = {i for split in calls if split.gathers for i in split.call.inputs if i in producers}
    per_image = 0
    for number in {*gathered, calls[-1].call.output}:  # The logits, too, for the loss.
        split = producers[number]
        if not split.sizes:
            continue
        size = activation_bytes(split.call)
        sent = size * (num_parts - 1)
        if number not in gathered:  # Only the first device needs the logits.
            sent = size - size * split.sizes[0] // sum(split.sizes)
        per_image += sent * (2 if trained[number] else 1)
    formula = "2 · images · (T − 1) · bytes of each gathered tensor"
    return "all-gather of activations, and their gradients", formula, num_examples * per_image


def _trained(calls: Sequence[LayerCall]) -> dict[int, bool]:
    """Returns output of a layer → whether its gradient is computed."""
    trained: dict[int, bool] = {}
    for call in calls:
        before = any(trained.get(i, False) for i in call.inputs)
        trained[call.output] = before or bool(call.layer.trainable_variables)
    return trained
