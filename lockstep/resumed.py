"""Compares a training that resumes from a checkpoint with one that was never interrupted.

The recording of the resumed process is compared as any other one, from the step with which it
resumes. What it has lost is named here: its own state before that step is compared with that of the
reference, and so are random numbers, examples, the learning rate and the scale of the loss.
"""

import collections
import copy
import dataclasses
import functools
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from lockstep.answer.verdict import STAGES, Finding, Verdict, merged
from lockstep.context import Context
from lockstep.data.match import Matching
from lockstep.data.trace import SEED, STATE, STATISTIC, WEIGHT, Trace
from lockstep.explain.random_layers import draws
from lockstep.numeric.arrays import (
    EPS,
    Array,
    Named,
    dense,
    distance,
    norm,
    ratio,
    rows_of,
    same_arrays,
    unit_of,
)
from lockstep.numeric.tolerance import Tolerance
from lockstep.reference import StepPair, match_traces
from lockstep.stages.claim import Variable, variables_of

_NEAR = 1e-4  # Relative; of weights that another layout has trained for some steps.
_PART = 0.01  # Of what the reference has changed since its first recorded step.
_NOUNS = {
    WEIGHT: ("weight", "weights"),
    STATISTIC: ("buffer or average", "buffers or averages"),
    STATE: ("array of optimizer state", "arrays of optimizer state"),
    SEED: ("seed", "seeds"),
}
_BEFORE_UPDATE = [*STAGES][: [*STAGES].index("update")]


def renumbered(trace: Trace, by: int, first: Trace) -> Trace:
    """Returns a recording whose steps have numbers that are higher, as far as the first has them.

    What was asked for counts no more: a reference may end before.
    """
    numbers = [step + by for step in trace.steps]
    kept = [*itertools.takewhile(lambda number: number in first.steps, numbers)]
    changes: dict[str, Any] = {"steps": tuple(kept), "asked": ()}
    if trace.about.framework == "jax" and by:  # Its script gives settings as functions of the step.
        settings = dict(zip(first.steps, first.about.settings, strict=False))
        changes["settings"] = tuple(settings[number] for number in kept)
    found, as_data = copy.copy(trace), trace.as_data
    found.about = dataclasses.replace(trace.about, **changes)
    found.of_replica = {
        replica: dataclasses.replace(about, **changes)
        for replica, about in trace.of_replica.items()
    }
    found.as_data = {
        axis: lambda read=read: renumbered(read(), by, first)  # type: ignore[misc]
        for axis, read in as_data.items()
    }
    return found


def first_step_of(first: Trace, second: Trace, names: Mapping[str, str], trained: int) -> int:
    """Returns the step of the reference from whose weights a recording starts.

    Only weights count that the reference changes. Step 0 is no answer: it is where a training
    begins that loads nothing.

    Args:
        first: the reference.
        second: the recording of the resumed process.
        names: name of a weight in one recording → name in the other, where they do not match.
        trained: the number of steps before, which is returned if the weights do not tell.
    """
    if second.steps[0]:
        return second.steps[0]  # The script says so.
    own = Context(second, 0).named("before")[0]
    starts = [Context(first, at).named("before")[0] for at in range(len(first.steps))]
    far = dict[int, float]()
    for number, start in zip(first.steps, starts, strict=True):
        apart = [
            ratio(
                distance(Variable(a, b, axes, WEIGHT, a).as_first(own[b]), start[a]), norm(start[a])
            )
            for a, b, axes in Matching(first, second, names).pairs
            if first.kinds[a] == WEIGHT and distance(starts[0][a], starts[-1][a])
        ]
        far |= {number: float(np.median(apart))} if apart and number else {}
    number = min(far, key=lambda n: (far[n], n != trained), default=0)
    return number if number and far[number] <= _NEAR else trained


class _Lost(NamedTuple):
    """A variable that is not restored, in words: "are 0 or missing"."""

    detail: str
    kind: str
    how: str


class Resumed:
    """The first step of a training that resumes, and the same step of the reference.

    Args:
        first: the reference.
        second: the recording of the resumed process; its steps have the numbers of the reference.
        names: name of a weight in one recording → name in the other, where they do not match.
    """

    def __init__(self, first: Trace, second: Trace, names: Mapping[str, str]) -> None:
        self._steps = [Context(first, position) for position in range(len(first.steps))]
        self._number = second.steps[0]
        self._first = self._steps[first.steps.index(self._number)]
        self._second = Context(second, 0)
        matching = match_traces(first, second, names)
        self._pair = StepPair(self._first, self._second, matching, Tolerance())
        self._is_alike = len(first.copies) == len(second.copies)

    @property
    def starts_equally(self) -> bool:
        """Whether the step starts from the weights of the reference but for the last digits."""
        return self._pair.starts_equally

    @functools.cached_property
    def _lost(self) -> list[Finding]:
        """What the first step lacks: state, random numbers, examples, the scale of the loss."""
        lost = [*self._lost_state(), *self._examples(), *self._loss_scale()]
        if not {name for f in lost for name in f.tensors} & {*self._second.of_kind(SEED)}:
            lost += self._other_numbers()
        return lost

    @functools.cached_property
    def _other_rates(self) -> list[Finding]:
        return [*self._rates()]

    @property
    def has_lost(self) -> bool:
        """Whether something was not restored, or the learning rate is another one."""
        return bool(self._lost or self._other_rates)

    def added_to(self, verdict: Verdict) -> Verdict:
        """Returns a verdict with what is lost, without what follows from that."""
        lost, rates = self._lost, self._other_rates
        if not self.has_lost:
            return verdict
        known = {finding.stage for finding in (*lost, *rates)}
        apart = ("examples",) if lost else _BEFORE_UPDATE
        others = [f for f in verdict.findings if f.stage in apart and f.stage not in known]
        if not lost:
            others += [f for f in verdict.findings if f.steps < rates[0].steps and f not in others]
        findings = merged([*lost, *rates, *others])
        return dataclasses.replace(verdict, findings=findings, notes=(), idle={})

    # State.

    def _lost_state(self) -> Iterator[Finding]:
        """Finds weights, buffers, averages and optimizer state that are not those of the step."""
        found, total = dict[_Lost, dict[str, set[int]]](), 0
        kind = "replaced" if self._second.has("replaced") else "before"
        states, rights = self._second.named(kind), self._first.named("before")
        for variable in self._variables():
            at = [copy if self._is_alike else 0 for copy in self._second.copies]
            wrong = dict[int, _Lost]()
            known = [c for c in self._second.copies if variable.first in rights[at[c]]]
            total += bool(known) and variable.kind == STATE
            for copy_ in known:
                if lost := self._why_lost(variable, states[copy_], rights, at[copy_]):
                    wrong[copy_] = lost
            is_owned = not self._is_alike and variable.kind == STATE and len(wrong) < len(known)
            for copy_, lost in wrong.items() if not is_owned else ():
                found.setdefault(lost, {}).setdefault(variable.second, set()).add(copy_)
        for detail in dict.fromkeys(lost.detail for lost in found):
            own = {lost: names for lost, names in found.items() if lost.detail == detail}
            texts = [self._in_words(lost, len(names), total) for lost, names in own.items()]
            copies = {c for names in own.values() for each in names.values() for c in each}
            yield self._second.found(
                "start", detail, f"before step {self._number}, {'; '.join(texts)}", kind="before",
                items=sorted(copies) if len(copies) < len(self._second.copies) else (),
                tensors=[name for names in own.values() for name in names],
            )  # fmt: skip

    def _in_words(self, lost: _Lost, number: int, total: int) -> str:
        one, several = _NOUNS[lost.kind]
        if lost.kind == STATE:
            return f"{number} of {total} {several} {lost.how}"
        return f"{number} {one if number == 1 else several} {lost.how}"

    def _variables(self) -> list[Variable]:
        """Returns what both trainings have, also state that the resumed one makes later."""
        seeds = [
            Variable(key, key, (), SEED, "")
            for key in self._first.of_kind(SEED)
            if key in self._second.trace.kinds
        ]
        return [*variables_of(self._pair), *seeds]

    def _why_lost(
        self, variable: Variable, own: Named, rights: Sequence[Named], at: int
    ) -> _Lost | None:
        """Returns what the value of a variable is in place of the right one; None if it is right.

        Args:
            variable: the variable.
            own: the state of its copy.
            rights: that of the copies in the reference, before the same step.
            at: the copy to compare with.
        """
        right = rights[at][variable.first]
        is_there = variable.second in own
        value = variable.as_first(own[variable.second]) if is_there else np.zeros(np.shape(right))
        if value.shape != np.shape(dense(right)) or self._fits(variable, value, right, at):
            return None
        if variable.kind == STATE and not norm(value):
            return _Lost("not_restored", STATE, "are 0 or missing")
        for step in self._steps:
            before = step.named("before")[at]
            if step is not self._first and _same(value, before.get(variable.first)):
                return _Lost("not_restored", variable.kind, f"as before step {step.number}")
        if any(_same(value, other.get(variable.first)) for other in rights):
            how = "of another replica, as of a checkpoint that one of them wrote"
            return _Lost("not_restored", variable.kind, how)
        slots = self._first.trace.slots
        others = [
            key for weight, own_slots in slots.items() for key in own_slots.values()
            if variable.kind == STATE and weight != variable.weight
        ]  # fmt: skip
        if np.size(value) > 1 and any(_same(value, rights[at].get(key)) for key in others):
            return _Lost("shifted_state", STATE, "of another weight")
        return _Lost("not_restored", variable.kind, "unlike those of the reference")

    def _fits(self, variable: Variable, value: np.ndarray, right: Array, at: int) -> bool:
        """Returns whether a value is right within the rounding of the steps before."""
        start = self._steps[0].named("before")[at].get(variable.first)
        moved = norm(right) if start is None else distance(right, start)
        if self._steps[0] is self._first:  # It is not known how far it has moved.
            moved = norm(right) * _NEAR / _PART
        allowed = max(4 * max(unit_of(right), EPS) * norm(right), _PART * moved)
        return distance(value, right) <= allowed

    # Random numbers, examples and settings.

    def _other_numbers(self) -> Iterator[Finding]:
        """Finds a first step that draws other random numbers."""
        first, second = self._first, self._second
        if len(first.shards) != len(second.shards) or not (first.has("random")):
            return
        wrong, again = list[int](), set[int]()
        for shard in second.shards:
            own = second.arrays("random")[shard] if draws(second, shard) else []
            if not own or same_arrays(own, first.arrays("random")[shard]):
                continue
            wrong.append(shard)
            again |= {
                s.number for s in self._steps
                if s.has("random") and same_arrays(own, s.arrays("random")[shard])
            }  # fmt: skip
        if wrong:
            which = f"those of step {min(again)} again" if again else "others than the reference"
            yield second.found(
                "random numbers", "not_restored",
                f"step {self._number} draws random numbers from another state: {which}",
                items=wrong if len(wrong) < len(second.shards) else (),
            )  # fmt: skip

    def _examples(self) -> Iterator[Finding]:
        """Finds a first step with the examples of an earlier one."""
        if not (self._second.has("data") and self._first.has("data")):
            return
        own = _rows(self._second)
        if not own or own == _rows(self._first):
            return
        for step in self._steps:
            if step.number < self._number and step.has("data") and own == _rows(step):
                what = "the order of examples begins" if step is self._steps[0] else "they come"
                text = (
                    f"step {self._number} has the examples of step {step.number} of the reference:"
                    f" {what} again"
                )
                yield self._second.found("examples", "examples_restarted", text)
                return

    def _rates(self) -> Iterator[Finding]:
        """Finds steps with another learning rate."""
        first, second = self._first.trace.about, self._second.trace.about
        if len(first.settings) != len(first.steps):
            return
        of_first = {n: _rates_of(s) for n, s in zip(first.steps, first.settings, strict=True)}
        for number, settings in zip(second.steps, second.settings, strict=False):
            own, right = _rates_of(settings), of_first[number]
            if own == right or len(own) != len(right):
                continue
            again = [n for n, rates in of_first.items() if rates == own and rates != right]
            shown = [", ".join(f"{x:.6g}" for x in dict.fromkeys(x)) for x in (own, right)]
            text = f"the learning rate of step {number} is {shown[0]}, in the reference {shown[1]}"
            text += f": that of step {again[0]}" if again else ""
            found = self._second.found("update", "other_learning_rate", text)
            yield dataclasses.replace(found, steps=(number,))

    def _loss_scale(self) -> Iterator[Finding]:
        """Finds another scale of the loss in the first step."""
        own, right = (
            step.trace.loss_scale(step.position, 0) for step in (self._second, self._first)
        )
        if own != right:
            text = (
                f"the loss scale of step {self._number} is {own:g}, in the reference {right:g}: the"
                " state of the scaler is not restored"
            )
            yield self._second.found("start", "not_restored", text)


def _same(value: np.ndarray, other: Array | None) -> bool:
    """Returns whether a value is another one but for the last digits."""
    return other is not None and distance(value, other) <= 4 * EPS * norm(other)


def _rows(step: Context) -> Mapping[int, int]:
    """Returns the examples of all shards."""
    return sum(map(rows_of, step.data), collections.Counter())


def _rates_of(settings: Sequence[Mapping[str, object]]) -> list[float]:
    """Returns the learning rates of all groups that have one."""
    rates = (group.get("learning_rate") for group in settings)
    return [float(rate) for rate in rates if isinstance(rate, int | float)]
