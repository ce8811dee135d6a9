"""Predicts with which other weights, or for which other examples, a shard may have computed."""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from lockstep.context import Context
from lockstep.hypotheses.of_parts import bounds, mixed
from lockstep.hypotheses.of_sums import SHORT
from lockstep.trace import WEIGHT, Named

OtherState = tuple[str, str, Mapping[str, Any]]  # Cause, text, and changes of `Context.ask`.

_MOST_LAYERS = 24  # With more layers, changes of a single one are not tried: each takes a step.


def other_states(context: Context, shard: int) -> Iterator[OtherState]:
    """Yields other states and examples from which a shard may have computed.

    The state or the examples of the step before, for all layers, a stage or a layer; weights of
    which a device has another part; biases that are left out or added again.
    """
    state = context.state(shard)
    yield from _of_the_step_before(context, shard, state)
    yield from _of_parts(context, state)
    yield from _rounded(context, state)
    for layer, names in _tried(context).items():
        yield from _of_layer(context, state, layer, names)


def _of_the_step_before(context: Context, shard: int, state: Named) -> Iterator[OtherState]:
    """Yields weights and examples of the step before: of all layers, of a stage, of one layer."""
    if not context.follows:
        return
    position = context.position - 1
    older = context.state(shard, position)
    yield "stale_weights", "those for the weights of the previous step", {"state": older}
    for number, names in enumerate(stages(context)):
        text = f"those with the previous step's weights of stage {number}"
        yield "stale_stage", text, {"state": state | {n: older[n] for n in names}}
    for layer, names in _tried(context).items():
        text = f"those with the previous step's weights of {layer}"
        yield "stale_weights", text, {"state": state | {n: older[n] for n in names}}
    for part, changed in mixed(context, state, older, context.of_kind(WEIGHT)):
        text = f"those with {part} as they were in the previous step"
        yield "stale_weights", text, {"state": state | changed}
    if (data := context.trace.arrays(position, "data", shard)) is not None:
        text = "those for the examples of the previous step"
        yield "stale_activations", text, {"data": data}


def _of_parts(context: Context, state: Named) -> Iterator[OtherState]:
    """Yields weights whose parts were put together wrongly."""
    weights = context.of_kind(WEIGHT)
    num = len(context.trace.about.parts) // context.trace.about.num_replicas
    biases = {name: num * state[name] for name in weights if name.endswith("bias")}
    if num > 1 and biases:
        text = f"those with all biases added {num} times"
        yield "repeated_bias", text, {"state": state | biases}
        for part, changed in mixed(context, state, state | biases, list(biases)):
            text = f"those with biases of which {part} are added {num} times"
            yield "repeated_bias", text, {"state": state | changed}
    for first, second in itertools.combinations(range(len(context.trace.about.parts)), 2):
        whose = f"of devices {first} and {second} exchanged"
        maps = [layer for layer in _tried(context).values() if state[layer[0]].ndim == 4]
        of_maps = [name for layer in maps for name in layer]
        for names in filter(None, (weights, of_maps, *_tried(context).values())):
            where = f" of {names[0].rpartition('/')[0]}" if names is not weights else ""
            where = " of all feature maps" if names is of_maps else where
            changed = with_exchanged_elements(context, state, names, first, second)
            yield (
                "swapped_parts",
                f"those with the elements{where} {whose}",
                {"state": changed},
            )
            changed = {n: _exchanged(state[n], context, first, second) for n in names}
            yield (
                "other_order_of_parts",
                f"those with the channels{where} {whose}",
                {"state": state | changed},
            )


def _rounded(context: Context, state: Named) -> Iterator[OtherState]:
    """Yields weights in a lower precision: all of them, or those of a device."""
    weights = context.of_kind(WEIGHT)
    for name, rounded in SHORT.items():
        short = {n: rounded(state[n]) for n in weights}
        text = f"those with weights that are rounded to {name}"
        yield "reduced_precision", text, {"state": state | short}
        matrices = {n: a for n, a in short.items() if a.ndim > 1}
        text = f"those with kernels that are rounded to {name}"
        yield "reduced_precision", text, {"state": state | matrices}
        for names in (weights, list(matrices)):
            for part, changed in mixed(context, state, short, names):
                text = f"those with {part} rounded to {name}"
                yield "reduced_precision", text, {"state": state | changed}


def _of_layer(
    context: Context, state: Named, layer: str, names: Sequence[str]
) -> Iterator[OtherState]:
    """Yields weights of a layer that are left out or added again, also by one device."""
    num = max(len(context.trace.about.parts) // context.trace.about.num_replicas, 1)
    for name in names:
        is_bias = name.endswith("bias")
        if is_bias and num > 1:
            text = f"those with {name} added {num} times"
            yield "repeated_bias", text, {"state": state | {name: num * state[name]}}
        text = f"those with zeros in place of {name}"
        yield "frozen", text, {"state": state | {name: np.zeros_like(state[name])}}
        channels = state[name].shape[-1] if state[name].ndim and num > 1 else 0
        for part, (start, end) in enumerate(bounds(channels, num) if channels else ()):
            for factor, cause in ((0, "frozen"), (num, "repeated_bias")):
                if factor and not is_bias:
                    continue
                changed = np.array(state[name])
                changed[..., start:end] *= factor
                what = "left out" if not factor else f"added {factor} times"
                text = f"those with device {part}'s part of {name} {what}"
                yield cause, text, {"state": state | {name: changed}}
    zeros = {name: np.zeros_like(state[name]) for name in names}
    yield "frozen", f"those with zeros in place of {layer}", {"state": state | zeros}


def stages(context: Context) -> list[list[str]]:
    """Returns the weights of each device of a replica, if no two of them hold the same one."""
    about = context.trace.about
    held = [list(part) for part in about.parts[: len(about.parts) // about.num_replicas]]
    names = [name for part in held for name in part]
    return held if len(held) > 1 and len(set(names)) == len(names) else []


def _tried(context: Context) -> dict[str, list[str]]:
    """Returns the layers if they are few enough to try a change of each."""
    found = layers(context)
    return found if len(found) <= _MOST_LAYERS else {}


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
