"""Predicts in which other mode, with which other variables or examples a shard has computed."""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from lockstep.context import Context
from lockstep.data.trace import WEIGHT
from lockstep.explain.tensors import SHORT, bounds, mixed, numbers_of_devices
from lockstep.numeric.arrays import Named

OtherStep = tuple[str, str, Mapping[str, Any]]  # Cause, text, and changes of `Context.ask`.

_MOST_LAYERS = 24  # With more layers, changes of a single one are not tried: each takes a step.


def other_steps(context: Context, shard: int) -> Iterator[OtherStep]:
    """Yields other steps that a shard may have computed: of another mode, state or examples."""
    state = context.state(shard)
    others = [number for number in context.shards if number != shard]
    if context.modal_layers:
        off = context.modal_layers
        yield "inference_mode", "those of the model in inference mode", {"off": off}
    for number in others if context.oracle.random_layers else ():
        text = f"those with the seeds of replica {number}"
        yield "same_random_numbers", text, {"state": state | context.seeds(number)}
    for number in others:
        text = f"those for the examples of {context.trace.name_of('data', number)}"
        examples = {"data": context.data[number], "starts": context.actual[number].starts}
        yield "same_examples", text, examples
    yield from _of_previous_step(context, shard, state)
    layer_names = context.oracle.layer_names
    for number, name in enumerate(layer_names) if len(layer_names) <= _MOST_LAYERS else ():
        for dtype in SHORT:
            text = f"those with the outputs of {name} rounded to {dtype}"
            yield "reduced_precision", text, {"short": ((number, dtype),)}
    groups, single = _groups(context, state), _single(context)
    for first, second in itertools.combinations(range(len(context.trace.about.parts)), 2):
        for where, names in (groups | single).items():
            whose = f"of devices {first} and {second} exchanged in {where}"
            changed = with_exchanged_elements(context, state, names, first, second)
            yield "swapped_parts", f"those with the elements {whose}", {"state": changed}
            changed = {n: _exchanged(state[n], context, first, second) for n in names}
            text = f"those with the channels {whose}"
            yield "other_order_of_parts", text, {"state": state | changed}
    for cause, text, other in _other_values(context, state, shard):
        for where, names in (groups | single).items():
            chosen = [name for name in names if name in other]
            if not chosen:
                continue
            changed = {name: other[name] for name in chosen}
            yield cause, f"those with {where} {text}", {"state": state | changed}
            if where in groups or cause in ("frozen", "repeated_bias"):
                for part, mixture in mixed(context, state, other, chosen):
                    yield cause, f"those with {part} of {where} {text}", {"state": state | mixture}


def _of_previous_step(context: Context, shard: int, state: Named) -> Iterator[OtherStep]:
    """Yields steps with weights or examples of the previous step."""
    if not (previous := context.previous):
        return
    older = previous.state(shard)
    yield "stale_weights", "those for the weights of the previous step", {"state": older}
    for number, names in enumerate(_stages(context)):
        text = f"those with the previous step's weights of stage {number}"
        yield "stale_stage", text, {"state": state | {n: older[n] for n in names}}
    if previous.has("data"):
        text = "those for the examples of the previous step"
        yield "other_examples", text, {"data": previous.data[shard]}


def _groups(context: Context, state: Named) -> dict[str, list[str]]:
    """Returns groups of weights in which a fault may be."""
    weights = context.of_kind(WEIGHT)
    groups = {
        "all weights": weights,
        "all kernels": [n for n in weights if state[n].ndim > 1],
        "all layers of feature maps": [
            n for layer in layers(context).values() if state[layer[0]].ndim == 4 for n in layer
        ],
        "all biases": [n for n in weights if n.endswith("bias")],
    }
    return {where: names for where, names in groups.items() if names}


def _single(context: Context) -> dict[str, list[str]]:
    """Returns single layers and weights, if they are few enough to try a change of each."""
    of_layers = layers(context)
    if len(of_layers) > _MOST_LAYERS:
        return {}
    found = {f"the weights of {layer}": names for layer, names in of_layers.items()}
    return found | {name: [name] for name in context.of_kind(WEIGHT)}


def _other_values(context: Context, state: Named, shard: int) -> Iterator[tuple[str, str, Named]]:
    """Yields cause, text and values that weights may have in place of their own."""
    weights = context.of_kind(WEIGHT)
    if context.previous:
        older = context.previous.state(shard)
        text = "as in the previous step"
        yield "stale_weights", text, {n: older[n] for n in weights}
    for num in numbers_of_devices(context):
        biases = {name: num * state[name] for name in weights if name.endswith("bias")}
        yield "repeated_bias", f"added {num} times", biases
    yield "frozen", "replaced by zeros", {name: np.zeros_like(state[name]) for name in weights}
    for name, rounded in SHORT.items():
        text = f"rounded to {name}"
        yield "reduced_precision", text, {n: rounded(state[n]) for n in weights}


def _stages(context: Context) -> list[list[str]]:
    """Returns the weights of each device of a replica, if no two of them hold the same one."""
    about = context.trace.about
    held = [list(part) for part in about.parts[: len(about.parts) // about.num_replicas]]
    names = [name for part in held for name in part]
    return held if len(held) > 1 and len(set(names)) == len(names) else []


def layers(context: Context) -> dict[str, list[str]]:
    """Returns the weights of each layer, by the part of their names before the last."""
    found: dict[str, list[str]] = {}
    for name in context.of_kind(WEIGHT):
        layer = name.replace(".", "/").rpartition("/")[0]
        found.setdefault(layer or name, []).append(name)
    return found


def with_exchanged_elements(
    context: Context, state: Named, names: Sequence[str], first: int, second: int, *,
    back: bool = False,
) -> Named:  # fmt: skip
    """Returns a state with two devices' ranges of elements exchanged, or exchanged back."""
    found = dict(state)
    for name in names:
        order = _exchanged(np.arange(state[name].size), context, first, second)
        order = np.argsort(order) if back else order
        found[name] = state[name].ravel()[order].reshape(state[name].shape)
    return found


def _exchanged(array: np.ndarray, context: Context, first: int, second: int) -> np.ndarray:
    """Returns an array with two devices' ranges of the last axis exchanged."""
    if not array.ndim:
        return array
    num = len(context.trace.about.parts)
    ranges = [array[..., start:end] for start, end in bounds(array.shape[-1], num)]
    ranges[first], ranges[second] = ranges[second], ranges[first]
    return np.concatenate(ranges, axis=-1)
