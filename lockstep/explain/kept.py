"""Reads what both trainings of a step keep: weights, and state of their optimizers by slots."""

from collections.abc import Sequence

import numpy as np

from lockstep.context import Context
from lockstep.numeric.arrays import dense
from lockstep.reference import StepPair
from lockstep.step import States, joined_states


def slots_of(pair: StepPair, first: str, second: str) -> dict[str, tuple[str, str]]:
    """Returns slot → keys in both recordings of the state of a weight that both have.

    Args:
        pair: the step.
        first, second: names of the weight in both; "" for common state.
    """
    own, other = pair.first.trace.slots.get(first, {}), pair.second.trace.slots.get(second, {})
    return {slot: (own[slot], other[slot]) for slot in own if slot in other}


def states_of(step: Context, key: str) -> list[States | None]:
    """Returns a variable before and after a step, for each copy; None where it is not known.

    What a step creates is 0 before it.
    """
    found = list[States | None]()
    for before, after in zip(step.named("before"), step.named("after"), strict=True):
        new = dense(after[key]) if key in after else None
        old = dense(before[key]) if key in before else None
        found.append(None if new is None else (np.zeros(new.shape) if old is None else old, new))
    return found


def whole_states(states: Sequence[States | None], shape: tuple[int, ...]) -> list[States]:
    """Returns the states of each copy, parts joined; empty if one lacks it, or they do not fit."""
    known = [state for state in states if state is not None]
    return joined_states(known, shape) if known and len(known) == len(states) else []
