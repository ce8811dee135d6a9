"""Pairs a step of two recordings, with the second's arrays in the layout of the first."""

from collections.abc import Sequence

import numpy as np

from app.verification.recordings.recorded_step import STATISTIC, WEIGHT, Named, RecordedStep
from app.verification.recordings.trace_arrays import relative_distances
from app.verification.script_match import Matching

_SAME_START = 1e-7  # Relative; states that are only transposed have a distance of 0.


class StepPair:
    """One step in two recordings.

    Args:
        first: the step in the recording that is the reference.
        second: the step in the other recording.
        matching: pairs of variables of both recordings.
    """

    def __init__(self, first: RecordedStep, second: RecordedStep, matching: Matching):
        self.first, self.second = first, second
        self._transposed = {pair.second: pair for pair in matching.pairs}
        self._names = {pair.first: pair.second for pair in matching.pairs}

    @property
    def number(self) -> int:
        """The number of the step, from 0."""
        return self.first.number

    def release(self) -> None:
        """Frees the arrays that were read."""
        self.first.release()
        self.second.release()

    def in_second(self, name: str) -> str:
        """Returns the second recording's name of a variable of the first; "" without one."""
        return self._names.get(name, "")

    def in_first(self, named: Named | None) -> Named:
        """Returns arrays of the second recording with the names and layouts of the first."""
        found = {}
        for name, array in (named or {}).items():
            if (pair := self._transposed.get(name)) is not None:
                axes = pair.transpose
                is_laid_out = axes is None or array.ndim != len(axes)
                found[pair.first] = array if is_laid_out else array.transpose(axes)
        return found

    def states(self, when: str, replica: int = 0) -> tuple[Named, Named]:
        """Returns weights and statistics of both recordings; of one replica of the second."""
        first = self.first.state(when, 0, WEIGHT, STATISTIC)
        second = self.in_first(self.second.state(when, replica, WEIGHT, STATISTIC))
        return {name: first[name] for name in first if name in second}, second

    def start_distance(self) -> float:
        """Returns the largest relative distance of the states before the step."""
        return max(_apart(*self.states("before")), default=float("inf"))

    @property
    def starts_equally(self) -> bool:
        """Whether both recordings start the step from the same weights and statistics."""
        return self.start_distance() <= _SAME_START

    def gradients(self) -> tuple[Named, Named] | None:
        """Returns the gradients of the whole batch before clipping; None if not recorded."""
        first, second = self.first.whole(), self.in_first(self.second.whole())
        if not first or not second:
            return None
        names = [name for name in first if name in second]
        return {name: first[name] for name in names}, {name: second[name] for name in names}

    def applied(self) -> tuple[Named, Named] | None:
        """Returns the gradients that replica 0 applies in both; None if not recorded."""
        first, second = self.first.applied(0), self.in_first(self.second.applied(0))
        if not first or not second:
            return None
        names = [name for name in first if name in second]
        return {name: first[name] for name in names}, {name: second[name] for name in names}


def _apart(first: Named, second: Named) -> Sequence[float]:
    return [
        distance
        for name in first
        for distance in relative_distances([second[name]], [first[name]])
        if np.size(first[name])
    ]
