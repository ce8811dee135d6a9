"""The gradient that an optimizer used, read off state that is linear in it.

A momentum, a first moment, or a weight under plain SGD, is state' = β · state + c · gradient. Both
numbers are solved from the reference, whose gradient is known; (state' − β · state) / c then is the
gradient that the other training used, also one that its optimizer has reduced itself.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from lockstep.explain.kept import recurrences, slots_of, states_of, whole_states
from lockstep.numeric.arrays import EPS, TINY, Named
from lockstep.numeric.sampling import with_sums
from lockstep.reference import StepPair

_UNITS = 8  # Of rounding of the state, before and after.


class Used(NamedTuple):
    """Gradients by the names of the checked trace, and how far rounding may move each element."""

    of_copies: list[Named]
    slack: Named


def used_gradients(pair: StepPair, names: Sequence[str]) -> Used | None:
    """Returns the gradients that the optimizers of all copies used; None if all are unknown.

    Without those of weights whose state is not linear.

    Args:
        pair: the step.
        names: names of the weights in the checked trace.
    """
    step = pair.second
    if not pair.has("before", "after"):
        return None
    found = Used([{} for _ in step.copies], {})
    for weight in pair.gradients.names:
        own = pair.in_second(weight)
        if own not in names:
            continue
        keys = [*slots_of(pair, weight, own).values(), (weight, own)]
        any(_add(found, pair, weight, own, each) for each in keys)
    return found if found.slack else None


def _add(found: Used, pair: StepPair, weight: str, own: str, keys: tuple[str, str]) -> bool:
    """Adds the gradient of a weight that a state gives; returns whether the state is linear."""
    gradient = pair.gradients.reference_applied[weight]
    state = states_of(pair.first, keys[0])[0]
    if state is None or state[1].shape != gradient.shape:
        return False
    old, new = state
    how = next(recurrences({weight: old}, {weight: new}, {weight: gradient}), None)
    if how is None or how.power != 1:
        return False
    kept, times, _ = how
    bound = _UNITS * EPS * (np.abs(new) + np.abs(kept * old) + np.abs(times * gradient)) + TINY
    num_sums = pair.first.trace.num_sums(bound.shape)
    bound = with_sums(bound, num_sums)
    if np.any(np.abs(new - kept * old - times * gradient) > bound):
        return False
    states = states_of(pair.second, keys[1])
    owned = [state for state in states if state is not None]
    if len(owned) == 1:  # The rank that has it sends what it updates.
        states = [*owned * len(states)]
    wholes = whole_states(states, gradient.shape)
    if not wholes:
        return False
    for copy, (own_old, own_new) in enumerate(wholes):
        found.of_copies[copy][own] = how.used(own_old, own_new)
        size = _UNITS * EPS * (np.abs(own_new) + np.abs(kept * own_old)) / abs(times)
        found.slack[own] = np.maximum(found.slack.get(own, 0.0), with_sums(size, num_sums))
    return True
