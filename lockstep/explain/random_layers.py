"""Tells whether layers draw random numbers, and the same ones in two trainings."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from lockstep.context import Context
from lockstep.data.trace import SEED
from lockstep.numeric.arrays import same_arrays
from lockstep.reference import StepPair


def draws_other_numbers(pair: StepPair) -> bool:
    """Returns whether a step draws with other keys than the reference, where keys are recorded."""
    right = pair.first.arrays("random")[0]
    others = [states for states in pair.second.arrays("random") if states]
    is_known = right and others and has_keys(pair)
    return bool(is_known) and not all(same_arrays(states, right) for states in others)


def has_keys(pair: StepPair) -> bool:
    """Returns whether random states are the keys that scripts pass: traces without layers."""
    return not any(step.trace.about.layers for step, _ in pair.both)


def own_states(context: Context, shard: int) -> Sequence[np.ndarray]:
    """Returns the random states of a shard, also where those of another recording replace them.

    A key that the step itself makes of the key that it is given is known for the latter only.
    """
    if context.has("own_random"):
        return context.arrays("own_random")[shard]
    drawn = context.arrays("random")[shard]
    if not (drawn and context.has("replaced")):
        return drawn
    copy = context.trace.copy_of(shard)
    given, own = (context.named(kind)[copy] for kind in ("before", "replaced"))
    names = [name for name in context.of_kind(SEED) if name in given and name in own]
    used = b"".join(given[name].tobytes() for name in names)
    is_used = names and used == b"".join(state.tobytes() for state in drawn)
    return [own[name].view(np.uint8) for name in names] if is_used else drawn


def draws(context: Context, shard: int) -> bool:
    """Returns whether a shard uses random numbers in the step.

    A generator that no layer uses may have the same state on all replicas, as after one
    `manual_seed`. Without its state after the step, the random layers decide; a trace without
    layers has the keys that the script passes to its step.
    """
    if not context.has("random"):
        return False
    before = context.arrays("random")[shard]
    if context.has("random_after"):
        return not same_arrays(before, context.arrays("random_after")[shard])
    layers = context.trace.about.layers
    return not layers or any(is_random(layer) for layer in layers)


def is_random(layer: Mapping[str, Any]) -> bool:
    """Returns whether a layer of a trace uses random numbers in training."""
    return "dropout" in str(layer.get("class", "")).lower() and layer.get("rate", 1) != 0
