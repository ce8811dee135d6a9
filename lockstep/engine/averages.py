"""Variables that follow others by a recurrence: averages of weights, and what gradients add up to.

Both recurrences are solved from the reference, whose gradients and weights are known: over all
steps and variables, as one step alone may not determine them.
"""

import functools
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from lockstep.data.trace import STATE, WEIGHT
from lockstep.engine.pair import Pair, State, Variable, copies_are_equal
from lockstep.engine.solve import CLOSE, solve
from lockstep.numeric.arrays import EPS, Named, dense, distance, norm

# An average has float32's digits; relative to its size, its sum of two terms has an error of 1e-6.
FITS = 1e-4


class Average(NamedTuple):
    """An average X of a variable W: X' = k·X + (1 − k)·W'.

    Attributes:
        source: the variable W.
        kept: number of a step → k.
    """

    source: Variable
    kept: Mapping[int, float]


class Averages:
    """The averages of weights that a reference keeps.

    Args:
        pairs: all steps.
    """

    def __init__(self, pairs: Sequence[Pair]) -> None:
        self._pairs = pairs

    def of(self, name: str) -> Average | None:
        """Returns what a variable is an average of; None if it is none."""
        return self._found.get(name)

    @functools.cached_property
    def _found(self) -> dict[str, Average]:
        """Variable → what it is an average of; those that determine no k have that of others."""
        variables = self._pairs[0].variables if self._pairs else []
        states = {v: self._states(v) for v in variables}
        sources = [v for v in variables if v.kind != STATE and states[v]]
        found, known = dict[str, Average](), dict[int, set[float]]()
        for _ in range(2):
            for variable in variables:
                if variable.kind != WEIGHT and variable.first not in found and states[variable]:
                    averages = (
                        self._average(states[variable], source, states[source], known)
                        for source in sources if source != variable
                    )  # fmt: skip
                    if average := next(filter(None, averages), None):
                        found[variable.first] = average
            for average in found.values():
                for number, kept in average.kept.items():
                    known.setdefault(number, set()).add(round(kept, 6))
        return found

    def _states(self, variable: Variable) -> dict[int, State]:
        """Returns number of a step → the variable in the reference, where it changes."""
        states = {pair.number: _of_reference(pair, variable) for pair in self._pairs}
        return {n: s for n, s in states.items() if s is not None and np.any(s.change)}

    @staticmethod
    def _average(
        states: Mapping[int, State], source: Variable, others: Mapping[int, State],
        known: Mapping[int, set[float]],
    ) -> Average | None:  # fmt: skip
        """Returns that a variable is an average of another one; None if it is not."""
        kept = dict[int, float]()
        for number, state in states.items():
            other = others.get(number)
            if other is None or np.shape(other.new) != np.shape(state.new):
                return None
            fitting = (k for k in known.get(number, ()) if _fits(state, other, k))
            k = _kept(state, other)
            k = next(fitting, None) if k is None else k
            if k is not None:
                kept[number] = k
            elif known or not _is_between(state, other):
                return None
        return Average(source, kept) if kept else None


def _of_reference(pair: Pair, variable: Variable) -> State | None:
    starts, ends = pair.reference.starts[0], pair.reference.ends[0]
    if variable.first not in starts or variable.first not in ends:
        return None
    return State(starts[variable.first], ends[variable.first])


def _kept(state: State, other: State) -> float | None:
    """Returns k of one step; None if it is not determined, or does not fit."""
    if np.size(state.new) < 2:
        return None
    terms = [{"": dense(state.old)}, {"": dense(other.new)}]
    (kept, share), known = solve({"": dense(state.new)}, terms, [""])
    is_average = known.all() and 0 <= kept < 1 and abs(kept + share - 1) < CLOSE
    return float(kept) if is_average and _fits(state, other, float(kept)) else None


def _fits(state: State, other: State, kept: float) -> bool:
    value = kept * dense(state.old) + (1 - kept) * dense(other.new)
    return norm(value - dense(state.new)) <= FITS * norm(state.new)


def _is_between(state: State, other: State) -> bool:
    """Returns whether each element lies between the old average and the weight, as for any k."""
    old, new, weight = dense(state.old), dense(state.new), dense(other.new)
    slack = FITS * np.max(np.abs(new), initial=0.0)
    return bool(np.all((new - old) * (new - weight) <= slack * np.abs(old - weight) + slack**2))


# --- What an optimizer used -----------------------------------------------------------------------


def read_used(pair: Pair, names: Sequence[str]) -> list[Named]:
    """Returns for each copy the gradients that its optimizer used, read off state linear in them.

    A momentum, a first moment, or a weight under plain SGD, is X' = β·X + c·g; both numbers are
    solved from the reference. Only where copies got unlike gradients: an optimizer may then reduce
    them by itself. Where something clips, sums are not what is used.
    """
    found = [Named() for _ in pair.copies]
    apart = {name for name in names if not copies_are_equal(pair.sums, name)}
    for variable in pair.variables:
        if variable.weight not in apart or any(variable.weight in own for own in found):
            continue
        states, gradient = pair.known_states(variable), pair.right_used[variable.weight]
        if states is None or np.shape(states[0].new) != gradient.shape or pair.clips:
            continue
        first, copies = states
        solved = linear_in(first, gradient)
        if solved is None:
            continue
        kept, times = solved
        for copy, state in enumerate(copies):
            old, new = variable.as_first(state.old), variable.as_first(state.new)
            if new.shape == gradient.shape:
                found[copy][variable.weight] = (new - kept * old) / times
    return found


def linear_in(state: State, gradient: np.ndarray) -> tuple[float, float] | None:
    """Returns β and c of X' = β·X + c·g; None if a variable is not this."""
    old, new = dense(state.old), dense(state.new)
    (kept, times), known = solve({"": new}, [{"": old}, {"": gradient}], [""])
    value = kept * old + times * gradient
    allowed = 16 * EPS * (norm(new) + norm(value))  # Two products and a sum, on each side.
    is_linear = known[1] and times and distance(new, value) <= allowed
    return (float(kept), float(times)) if is_linear else None
