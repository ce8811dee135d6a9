"""Reads what both trainings of a step keep: weights, and state of their optimizers by slots."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from lockstep.context import Context
from lockstep.explain.solve import solve
from lockstep.numeric.arrays import MARGIN, TINY, Named, dense, is_far, unit_of
from lockstep.reference import StepPair
from lockstep.step import States, joined_states

FEW = 0.1  # Part of the elements: signs of few may differ by rounding.
_CLOSE = 1e-3  # Relative; of state that is a sum.


class Change(NamedTuple):
    """A weight, or a state of it, before and after the step in both traces.

    Attributes:
        weight: name of the weight in the first trace.
        slot: name of the state; "" for the weight itself.
        before, after: its arrays in both traces, in the layout of the first.
    """

    weight: str
    slot: str
    before: Sequence[np.ndarray]
    after: Sequence[np.ndarray]

    @property
    def by(self) -> list[np.ndarray]:
        """By how much it changes in both traces."""
        return [dense(new) - dense(old) for old, new in zip(self.before, self.after, strict=True)]

    @property
    def rounding(self) -> np.ndarray:
        """How far rounding can move each element."""
        unit = max(unit_of(array) for array in self.after)
        return MARGIN * unit * np.sum([np.abs(dense(a)) for a in self.after], axis=0) + TINY

    def differs(self, is_near: np.ndarray, allowed: float, factor: float = 1.0) -> bool:
        """Returns whether more than a few elements change by another factor.

        Args:
            is_near: which elements have nearly equal gradients.
            allowed: relative difference of changes.
            factor: factor over the change in the first trace.
        """
        first, second = self.by
        if is_near.shape != first.shape:  # Factored state has means of rows.
            is_near = np.ones(first.shape, bool)
        size = np.maximum(np.abs(factor * first), np.abs(second))
        far = np.abs(second - factor * first) > allowed * size + self.rounding
        return bool(np.any(is_near)) and float(np.mean(far[is_near])) > FEW


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


class Recurrence(NamedTuple):
    """How the reference's state follows gradients: X' = kept · X + times · gradientᵖ."""

    kept: float
    times: float
    power: int

    def used(self, old: np.ndarray, new: np.ndarray) -> np.ndarray:
        """Returns the gradient, or its power, that changes state in this way."""
        return np.asarray((new - self.kept * old) / self.times)


def recurrences(old: Named, new: Named, gradients: Named) -> Iterator[Recurrence]:
    """Yields how state may follow gradients, or their squares, to a few digits."""
    for power in (1, 2):
        terms = [old, {name: gradients[name] ** power for name in new}]
        (kept, times), known = solve(new, terms)
        if known[1] and times and not any(
            is_far(kept * old[name] + times * terms[1][name], new[name], _CLOSE) for name in new
        ):  # fmt: skip
            yield Recurrence(float(kept), float(times), power)
