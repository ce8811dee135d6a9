"""Explains steps that lose what 16 bits of a weight cannot hold, and its optimizer's state keeps.

State may hold the weight itself in float32 (master weights), or what rounding has left of it
(compensation). Together, they change by the update of the reference, whatever its rule.
"""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from lockstep.explain.kept import slots_of, states_of, whole_states
from lockstep.explain.tensors import to_bfloat16
from lockstep.numeric.arrays import EPS, TINY, UNITS, factor_of, norm, same_bits, unit_of
from lockstep.reference import StepPair
from lockstep.step import States

_CLOSE = 0.02  # Relative to what 16 bits lose, of which float32 keeps five digits.
_OTHER_STATE = 1e-3  # Relative; of state that is not that of rounding in float32.
_ROUNDED = 0.05  # The same of few bits.
_FEW = 0.05  # Part of the elements that two roundings in a row may move by a unit.


class _Kept(NamedTuple):
    """A weight by both its names, and its state, before and after the step in both trainings."""

    first: str
    name: str
    weights: tuple[States, States]
    state: tuple[States, States]


def lost_digits(pair: StepPair) -> Iterator[tuple[str, str, str]]:
    """Yields cause, sentence and the checked recording's name of each weight that they explain."""
    yield from _of_rounding(pair)
    for kept in _kept(pair):
        old = kept.state[1][0]
        if not norm(old) or _differ_by_rounding(kept):
            continue
        if why := _of_master(kept) or _of_compensation(kept):
            yield (*why, kept.name)


def _of_rounding(pair: StepPair) -> Iterator[tuple[str, str, str]]:
    """Yields weights of bfloat16 that plain SGD leaves, and scripts round up or down.

    The exact update is that of the learning rate; both neighbours of it are in reach.
    """
    rates = {step.trace.about.optimizer.get("learning_rate") for step, _ in pair.both}
    rate = rates.pop()
    if rates or not isinstance(rate, float) or not pair.is_applied_right:
        return
    found, counts = list[str](), np.zeros(3)  # Elements that each rounds to nearest, and all.
    for names in pair.matching.pairs:
        gradient = pair.gradients.reference_applied.get(names.first)
        if any(step.trace.slots.get(name) for step, name in (
            (pair.first, names.first), (pair.second, names.second)
        )):  # fmt: skip
            return  # It may keep what rounding leaves.
        right = states_of(pair.first, names.first)[0]
        own = states_of(pair.second, names.second)[0]
        if gradient is None or right is None or own is None:
            continue
        (old, first), (own_old, second) = right, own
        if gradient.shape != old.shape or not same_bits(old, own_old) or any(
            unit_of(np.float32(each)) != UNITS["bfloat16"] for each in (old, first, second)
        ):  # fmt: skip
            return
        exact = old - rate * gradient
        nearest, step = to_bfloat16(exact), UNITS["bfloat16"] * np.abs(exact) * (1 + _CLOSE)
        if np.any(np.abs(first - exact) > step) or np.any(np.abs(second - exact) > step):
            return
        counts += [*(np.sum(np.float32(each) == nearest) for each in (first, second)), first.size]
        if not same_bits(first, second):
            found.append(names.second)
    # A tie may be rounded to either side.
    of_first, of_second = counts[:2] > (1 - _FEW) * counts[2]
    if of_first:
        return
    cause, how = ("other_random_numbers", "by other random numbers")
    if of_second:
        cause, how = ("reduced_precision", "to the nearest number of 16 bits")
    for name in found:
        yield (
            cause,
            f"weights are rounded {how}, and in the first recording up or down at random",
            name,
        )


def _kept(pair: StepPair, *, of_any: bool = False) -> Iterator[_Kept]:
    """Yields weights of bfloat16, or any, with each state in float32 that has their shape."""
    if not pair.has("before", "after"):
        return
    steps = pair.first, pair.second
    for names in pair.matching.pairs:
        first, second = states_of(steps[0], names.first)[0], states_of(steps[1], names.second)[0]
        if first is None or second is None or any(
            not of_any and unit_of(np.asarray(each, np.float32)) != UNITS["bfloat16"]
            for each in (*first, *second)
        ):  # fmt: skip
            continue
        for keys in slots_of(pair, *names[:2]).values():
            states = [
                whole_states(states_of(step, key), first[1].shape)
                for step, key in zip(steps, keys, strict=True)
            ]
            if all(states):
                yield _Kept(*names[:2], (first, second), (states[0][0], states[1][0]))


def followed_states(pair: StepPair) -> Iterator[tuple[str, str, str]]:
    """Yields cause, sentence, and weights that follow state with other digits, by the same factor.

    A weight is then W' = W + c · state' in both trainings, with one c, and the state is another one
    although the gradients and the state before are the same.
    """
    if not (pair.has("before", "after") and pair.is_applied_right):
        return
    known, allowed = pair.rules(), max(_OTHER_STATE, 10 * pair.tolerance.usual)
    for kept in _kept(pair, of_any=True):
        (old, first), (own_old, second) = kept.state
        moved = [new - before for before, new in kept.weights]
        factor = factor_of([moved[0]], [first])
        is_same_start = norm(own_old - old) <= EPS * norm(old)
        far = norm(second - first) / max(norm(first), TINY)
        is_other = allowed < far < _ROUNDED
        if kept.first in known or not (is_same_start and is_other and np.isfinite(factor)):
            continue
        if all(
            norm(by - factor * state) <= _CLOSE * allowed * norm(by) + EPS * norm(weights[1])
            for by, state, weights in zip(moved, (first, second), kept.weights, strict=True)
        ):
            text = (
                f"the state differs by {far:.2g} after equal gradients and states, and the weight"
            )
            yield "other_optimizer", f"{text} follows it as in the first recording", kept.name


def _differ_by_rounding(kept: _Kept) -> bool:
    """Returns whether both trainings leave the same weight and state."""
    (_, first), (old, second) = kept.state
    size = norm(np.abs(old) + np.abs(kept.weights[1][1]))
    is_same = norm(second - first) <= EPS * size
    return is_same and same_bits(kept.weights[0][1], kept.weights[1][1])


def _of_master(kept: _Kept) -> tuple[str, str] | None:
    """Explains a weight whose state holds it in float32."""
    (first, first_new), (old, new) = kept.state
    before, after = kept.weights[1]
    if not same_bits(to_bfloat16(first_new), np.float32(kept.weights[0][1])):
        return None
    lost, update = norm(old - before), first_new - first
    if lost and norm(new - before - update) <= _CLOSE * lost:
        text = "the float32 copy of the weight is made anew from the 16-bit weight"
        return "reduced_precision", f"{text}, which has lost its other digits"
    short = to_bfloat16(before + to_bfloat16(update))
    if same_bits(old, new) and np.mean(short != np.float32(after)) <= _FEW:
        text = "the 16-bit weight is updated, and not its float32 copy"
        return "reduced_precision", text
    return None


def _of_compensation(kept: _Kept) -> tuple[str, str] | None:
    """Explains a weight whose state holds what its rounding has left."""
    totals = [
        state[1] + weight[1] - weight[0]
        for state, weight in zip(kept.state, kept.weights, strict=True)
    ]
    old, apart = kept.state[1][0], totals[1] - totals[0]
    factor = factor_of([apart], [old])
    if not np.isfinite(factor) or norm(apart - factor * old) > _CLOSE * norm(old):
        return None
    if abs(factor + 1) < _CLOSE:
        text = "the update does not add what rounding to 16 bits has left of the last one"
        return "reduced_precision", text
    if abs(factor + 2) < _CLOSE:
        text = "the update subtracts what rounding to 16 bits has left of the last one"
        return "other_optimizer", f"{text}, which the first recording adds"
    return None
