"""Predicts with which other weights, or in which other way, a shard may have computed."""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from lockstep.context import Context
from lockstep.trace import WEIGHT, Named

OtherState = tuple[str, str, Mapping[str, Any]]  # Cause, text, and changes of `Context.ask`.


def other_states(context: Context, shard: int) -> Iterator[OtherState]:
    """Yields other states from which a shard may have computed.

    The whole state of the step before, that of a stage or a layer; weights of which a device has
    another part; repeated biases.
    """
    state = context.state(shard)
    yield from _of_the_step_before(context, shard, state)
    yield from _of_parts(context, state)
    yield from _of_layers(context, state)


def _of_the_step_before(context: Context, shard: int, state: Named) -> Iterator[OtherState]:
    """Yields the weights of the step before: of all layers, of a stage, of one layer."""
    if not context.follows:
        return
    older = context.state(shard, context.position - 1)
    yield (
        "stale_weights", "those for the weights of the previous step", {"state": older}
    )  # fmt: skip
    for number, names in enumerate(stages(context)):
        text = f"those with the previous step's weights of stage {number}"
        yield "stale_stage", text, {"state": state | {n: older[n] for n in names}}
    for layer, names in layers(context).items():
        text = f"those with the previous step's weights of {layer}"
        yield "stale_weights", text, {"state": state | {n: older[n] for n in names}}


def _of_parts(context: Context, state: Named) -> Iterator[OtherState]:
    """Yields weights whose parts were put together wrongly, and biases that are added again."""
    about = context.trace.about
    num = len(about.parts) // about.num_replicas
    biases = {name: array for name, array in state.items() if name.endswith("bias")}
    if num > 1 and biases:
        for layer, names in {"": list(biases), **layers(context)}.items():
            changed = {name: num * state[name] for name in names if name in biases}
            if changed:
                where = f" of {layer}" if layer else ""
                text = f"those with biases{where} that are added {num} times"
                yield "repeated_bias", text, {"state": state | changed}
    for first, second in itertools.combinations(range(len(about.parts)), 2):
        for swap, how in ((_swapped_elements, "elements"), (_swapped_channels, "channels")):
            changed = swap(context, state, first, second)
            text = f"those with the {how} of devices {first} and {second} exchanged"
            yield "swapped_parts", text, {"state": state | changed}


def _of_layers(context: Context, state: Named) -> Iterator[OtherState]:
    """Yields zeros in place of the weights of a layer, or of its bias."""
    for layer, names in layers(context).items():
        zeros = {name: np.zeros_like(state[name]) for name in names}
        yield "frozen", f"those with zeros in place of {layer}", {"state": state | zeros}
        for name in names if len(names) > 1 else ():
            text = f"those with zeros in place of {name}"
            yield "frozen", text, {"state": state | {name: zeros[name]}}


def stages(context: Context) -> list[list[str]]:
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


def bounds(size: int, num: int) -> list[tuple[int, int]]:
    """Returns the ranges of `num` nearly equal parts; the first ones are larger."""
    sizes = [size // num + (part < size % num) for part in range(num)]
    return [(sum(sizes[:part]), sum(sizes[: part + 1])) for part in range(num)]


def _swapped_elements(context: Context, state: Named, first: int, second: int) -> Named:
    """Returns weights with two devices' ranges of elements exchanged."""
    num = len(context.trace.about.parts)
    found = {}
    for name in context.of_kind(WEIGHT):
        flat = state[name].ravel()
        ranges = [flat[start:end] for start, end in bounds(flat.size, num)]
        ranges[first], ranges[second] = ranges[second], ranges[first]
        found[name] = np.concatenate(ranges).reshape(state[name].shape)
    return found


def _swapped_channels(context: Context, state: Named, first: int, second: int) -> Named:
    """Returns weights with two devices' output channels exchanged."""
    num, found = len(context.trace.about.parts), {}
    for name in context.of_kind(WEIGHT):
        array = state[name]
        if not array.ndim:
            continue
        ranges = [array[..., start:end] for start, end in bounds(array.shape[-1], num)]
        ranges[first], ranges[second] = ranges[second], ranges[first]
        found[name] = np.concatenate(ranges, axis=-1)
    return found


def channels_of(context: Context) -> Mapping[str, Sequence[int]]:
    """Returns weight → its output channels on each device of a replica; empty for other splits."""
    about = context.trace.about
    held = about.parts[: len(about.parts) // about.num_replicas]
    if len(held) < 2 or any(set(part) != set(held[0]) for part in held):
        return {}
    return {name: [part[name][-1] for part in held] for name in held[0]}
