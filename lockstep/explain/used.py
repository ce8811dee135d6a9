"""The gradient that an optimizer used, read off state that is linear in it.

A momentum, a first moment, or a weight under plain SGD, is state' = β · state + c · gradient. Both
numbers are solved from the reference, whose gradient is known; (state' − β · state) / c then is the
gradient that the other training used, also one that its optimizer has reduced itself.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from lockstep.explain.solve import solve
from lockstep.numeric.arrays import EPS, TINY, Named, dense
from lockstep.numeric.sampling import with_sums
from lockstep.reference import StepPair
from lockstep.step import joined_states

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
        any(_add(found, pair, weight, own, slot) for slot in _slots(pair, weight, own))
    return found if found.slack else None


def _slots(pair: StepPair, weight: str, own: str) -> list[tuple[str, str]]:
    """Returns pairs of keys that may be linear in a weight's gradient."""
    first = pair.first.trace.slots.get(weight, {})
    second = pair.second.trace.slots.get(own, {})
    return [(first[slot], second[slot]) for slot in first if slot in second] + [(weight, own)]


def _add(found: Used, pair: StepPair, weight: str, own: str, keys: tuple[str, str]) -> bool:
    """Adds the gradient of a weight that a state gives; returns whether the state is linear."""
    gradient = pair.gradients.reference_applied[weight]
    before, after = (pair.first.named(kind)[0] for kind in ("before", "after"))
    if keys[0] not in after or np.shape(after[keys[0]]) != gradient.shape:
        return False
    new = dense(after[keys[0]])
    old = dense(before[keys[0]]) if keys[0] in before else np.zeros(new.shape)
    (kept, times), known = solve({weight: new}, [{weight: old}, {weight: gradient}])
    if not known[1] or not times:
        return False
    bound = _UNITS * EPS * (np.abs(new) + np.abs(kept * old) + np.abs(times * gradient)) + TINY
    num_sums = pair.first.trace.num_sums(bound.shape)
    bound = with_sums(bound, num_sums)
    if np.any(np.abs(new - kept * old - times * gradient) > bound):
        return False
    states = [_states(pair, copy, keys[1]) for copy in pair.second.copies]
    owned = [state for state in states if state is not None]
    if len(owned) == 1:  # The rank that has it sends what it updates.
        owned *= len(states)
    if len(owned) < len(states):
        return False
    wholes = joined_states(owned, gradient.shape)
    if not wholes:
        return False
    for copy, (own_old, own_new) in enumerate(wholes):
        used = (own_new - kept * own_old) / times
        found.of_copies[copy][own] = used
        size = _UNITS * EPS * (np.abs(own_new) + np.abs(kept * own_old)) / abs(times)
        found.slack[own] = np.maximum(found.slack.get(own, 0.0), with_sums(size, num_sums))
    return True


def _states(pair: StepPair, copy: int, key: str) -> tuple[np.ndarray, np.ndarray] | None:
    before, after = (pair.second.named(kind)[copy] for kind in ("before", "after"))
    if key not in after:
        return None
    new = dense(after[key])
    return (dense(before[key]) if key in before else np.zeros(new.shape)), new
