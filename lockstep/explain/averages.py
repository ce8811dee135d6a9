"""Explains what averages of weights, or copies of statistics, follow, and how often."""

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from lockstep.answer.text import count
from lockstep.data.trace import STATISTIC, WEIGHT
from lockstep.numeric.arrays import EPS, MARGIN, TINY, Named, dense, factor_of
from lockstep.reference import StepPair

_MOST_UPDATES = 8  # Of an average in a step.
_LEAST = 8  # Elements that tell a decay.

Why = tuple[str, str]  # Detail and sentence.


class _States(NamedTuple):
    """The variables of a recording before and after a step, by the names of the reference."""

    before: Named
    after: Named

    def average(self, names: Mapping[str, str], decay: float, early: int, late: int) -> Named:
        """Returns averages after updates with what they follow, before and after it has changed.

        Args:
            names: name of an average → name of what it follows.
            decay: the weight of the average's own value.
            early, late: number of updates with the old value, and then with the new one.
        """
        by_old, by_new = decay**early, decay**late
        return {
            name: by_new * (by_old * self.before[name] + (1 - by_old) * self.before[of])
            + (1 - by_new) * self.after[of]
            for name, of in names.items()
        }

    def solved_decay(self, names: Mapping[str, str]) -> float:
        """Returns the decay of one update with which averages come nearest to what they are."""
        own = [self.after[name] - self.after[of] for name, of in names.items()]
        return factor_of(own, [self.before[name] - self.after[of] for name, of in names.items()])

    def fits(self, names: Mapping[str, str], predicted: Named) -> bool:
        """Returns whether averages are within rounding of some values."""
        for name, of in names.items():
            arrays = self.before[name], self.after[name], self.before[of], self.after[of]
            size = np.sum([np.abs(array) for array in arrays], axis=0)
            near = np.abs(predicted[name] - self.after[name]) <= MARGIN * EPS * size + TINY
            if not np.all(near):
                return False
        return True


def why_averages(pair: StepPair, wrong: Sequence[str]) -> Iterator[tuple[str, str, list[str]]]:
    """Yields detail, sentence and names of averages that follow their weights in another way.

    What an average follows has its name, after that of the average's module, and its shape. The
    reference shows the decay: one that does not follow its weights by a decay is not explained.

    Args:
        pair: the step.
        wrong: names of statistics that change differently from the reference.
    """
    first, second = _states(pair, "first"), _states(pair, "second")
    for kind in (WEIGHT, STATISTIC):
        names = _followed(pair, [n for n in wrong if n in first.after], first, kind)
        if sum(first.after[name].size for name in names) < _LEAST:
            continue
        decay = first.solved_decay(names)
        if not (0 <= decay < 1 + EPS and first.fits(names, first.average(names, decay, 0, 1))):
            decay = 0.0  # A solved number is not exact where an average is a copy.
            if not first.fits(names, first.average(names, decay, 0, 1)):
                continue
        found = [*_fitting(pair, names, second, decay)]
        if later := next((each for each in pair.steps() if _is_next(pair, each)), None):
            # In a first step, the average is that of the weights: a later one tells.
            both = [why for why in found if why[0] in {x for x, _ in _fitting(later, names,
                    _states(later, "second"), decay)}]  # fmt: skip
            found = both or found
        if found:
            yield *found[0], [*names]


def _states(pair: StepPair, which: str) -> _States:
    step = pair.first if which == "first" else pair.second
    found = [step.named("before")[0], step.ends[0]]
    if which == "second":
        found = [pair.matching.to_first(own) for own in found]
    before, after = ({name: dense(a) for name, a in own.items()} for own in found)
    return _States(before, after)


def _is_next(pair: StepPair, other: StepPair) -> bool:
    places = [(each.first.position, each.second.position) for each in (pair, other)]
    return places[1] == (places[0][0] + 1, places[0][1] + 1) and other.has("before", "after")


def _followed(
    pair: StepPair, averages: Sequence[str], states: _States, kind: str
) -> dict[str, str]:
    """Returns name of an average → name of the variable of a kind that it follows."""
    others, found = pair.first.of_kind(kind), dict[str, str]()
    for name in averages:
        known = [
            of for of in others
            if of in states.before and of in states.after and name.endswith((f".{of}", f"/{of}"))
            and states.after[of].shape == states.after[name].shape
        ]  # fmt: skip
        if known:
            found[name] = max(known, key=len)
    return found


def _fitting(
    pair: StepPair, names: Mapping[str, str], states: _States, decay: float
) -> Iterator[Why]:
    """Yields what averages follow in a recording, if it is not what they should."""
    whose = f"the average{'s' if len(names) > 1 else ''} of {count('variable', len(names))}"
    if any(n not in states.after or of not in states.after for n, of in names.items()):
        return
    if states.fits(names, states.average(names, decay, 0, 1)):
        return
    if decay and states.fits(names, states.average(names, decay, 1, 0)):
        yield "stale_average", f"{whose} follow the values of before the update"
    for number in range(2, _most_updates(pair) + 1) if decay else ():
        for early in range(number):
            if states.fits(names, states.average(names, decay, early, number - early)):
                when = f", {early} of them before the update" if early else ""
                yield "doubled_average", f"{whose} are updated {number} times in the step{when}"
                break
    if states.fits(names, {name: states.before[name] for name in names}):
        yield "not_updated", f"{whose} do not change"
        return
    solved = states.solved_decay(names)
    if solved > 0 and states.fits(names, states.average(names, solved, 0, 1)):
        text = f"{whose} have a decay of {solved:.6g}, and of {decay:.6g} in the first recording"
        yield "other_average_decay", text


def _most_updates(pair: StepPair) -> int:
    """Returns how often a script may update an average: once for each rank, or micro-batch."""
    step = pair.second
    numbers = step.trace.about.num_replicas, len(step.copies), len(step.shards)
    micro_batches = step.trace.micro_batches(step.position, 0)
    return min(_MOST_UPDATES, max(2, micro_batches, *numbers))
