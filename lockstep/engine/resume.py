"""What a training that resumes from a checkpoint lacks: its first step against the reference's.

The recording of the resumed process is compared from the step with which it resumes. Its own state
before that step is judged here, and so are random numbers and the scale of the loss:
what is not restored shows as what it is in its place.
"""

import copy
import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from lockstep.data.match import Matching
from lockstep.data.trace import SEED, STATE, STATISTIC, WEIGHT, Trace
from lockstep.engine.claim import NEAR_START, stays_zero
from lockstep.engine.look import Finding
from lockstep.engine.pair import Pair, Variable
from lockstep.engine.random import draws, own_states
from lockstep.engine.solve import Formula
from lockstep.engine.step import Step
from lockstep.engine.verdict import GRADIENT, RANDOM, START
from lockstep.numeric.arrays import EPS, Named, dense, distance, norm, ratio, same_arrays, unit_of

# A restored variable may differ by rounding, which is less than this part of its whole change.
OF_CHANGE = 0.01
# Digits of a copy that was saved and loaded, in another layout.
COPIED = 4
NOUNS = {WEIGHT: "weights", STATISTIC: "buffers or averages", STATE: "arrays of optimizer state",
         SEED: "seeds"}  # fmt: skip


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
    own, starts = Step(second, 0).own_starts[0], _starts(first)
    weights = [
        names for names in Matching(first, second, names).pairs
        if first.kinds[names.first] == WEIGHT and names.second in own
        and all(names.first in start for start, *_ in starts)
        and distance(starts[0][0][names.first], starts[-1][0][names.first])
    ]  # fmt: skip
    far = dict[int, float]()
    for number, (start, *_) in zip(first.steps, starts, strict=True):
        apart = [
            ratio(distance(pair.as_first(own[pair.second]), start[pair.first]),
                  norm(start[pair.first])) for pair in weights
        ]  # fmt: skip
        far |= {number: float(np.median(apart))} if apart and number else {}
    number = min(far, key=lambda n: (far[n], n != trained), default=0)
    return number if number and far[number] <= NEAR_START else trained


def _starts(trace: Trace) -> list[list[Named]]:
    """Returns the variables of each copy before each step."""
    return [Step(trace, position).named("before") for position in range(len(trace.steps))]


def lost(pair: Pair) -> Finding | None:
    """Returns what the first step of a training that resumes lacks; None if it lacks nothing."""
    return _lost_state(pair) or _other_numbers(pair) or _other_scale(pair)


# --- State ----------------------------------------------------------------------------------------


def _lost_state(pair: Pair) -> Finding | None:
    """Finds weights, statistics, optimizer state and seeds that are not those before the step.

    Copies are compared with those of the reference, if it has as many, else with its first one.
    """
    starts, found = _starts(pair.reference.trace), dict[tuple[str, str], dict[str, list[int]]]()
    rights = pair.reference.named("before")
    is_alike = len(rights) == len(pair.copies)
    known = {*pair.training.trace.kinds}
    seeds = [Variable(x, x, (), SEED, "") for x in pair.reference.of_kind(SEED) if x in known]
    for variable in [*pair.variables, *seeds]:
        wrong = dict[int, str]()
        for rank, own in enumerate(pair.training.own_starts):
            at = rank if is_alike else 0
            if variable.first in rights[at] and (how := _in_place(variable, own, starts, pair, at)):
                wrong[rank] = how
        may_be_owned = variable.kind == STATE and not is_alike and len(wrong) < len(pair.copies)
        if may_be_owned and all(stays_zero(pair, variable, rank) for rank in wrong):
            continue  # Another rank owns it.
        for rank, how in wrong.items():
            found.setdefault((variable.kind, how), {}).setdefault(variable.first, []).append(rank)
    formulas, texts = list[Formula](), list[str]()
    for (kind, how), of in found.items():
        copies = tuple(sorted({rank for ranks in of.values() for rank in ranks}))
        formulas.append(Formula((*of,), (), (), (), copies, words=how))
        total = sum(v.kind == kind and v.first in rights[0] for v in [*pair.variables, *seeds])
        texts.append(f"{len(of)} of {total} {NOUNS[kind]}: {how}")
    names = tuple(dict.fromkeys(name for formula in formulas for name in formula.names))
    ranks = tuple(sorted({rank for formula in formulas for rank in formula.copies}))
    seen = {"is_resumed": True, "text": "; ".join(texts)}
    return Finding(START, names, ranks, (*formulas,), (), seen) if found else None


def _in_place(
    variable: Variable, own: Named, starts: Sequence[Sequence[Named]], pair: Pair, at: int
) -> str:
    """Returns what is in the place of a variable of a copy, in words; "" if it is restored.

    Args:
        variable: the variable.
        own: the state of the copy.
        starts: the reference's copies before each of its steps.
        pair: the step.
        at: the copy of the reference to compare with.
    """
    rights, first = starts[pair.reference.position], variable.first
    right = rights[at][first]
    is_there = variable.second in own
    value = variable.as_first(own[variable.second]) if is_there else np.zeros(np.shape(right))
    # How far the steps before have moved it; of a reference that begins here, that is not known.
    moved = norm(right) * NEAR_START / OF_CHANGE
    if pair.reference.position:
        start = starts[0][at].get(first)
        moved = norm(right) if start is None else distance(right, start)
    allowed = max(COPIED * max(unit_of(right), EPS) * norm(right), OF_CHANGE * moved)
    if value.shape != np.shape(dense(right)) or distance(value, right) <= allowed:
        return ""
    if variable.kind == STATE and not norm(value):
        return "0 or missing"
    for number, before in zip(pair.reference.trace.steps, starts, strict=True):
        if number != pair.number and _same(value, before[at].get(first)):
            return f"as before step {number}"
    if any(_same(value, other.get(first)) for other in rights):
        return "of another replica"
    others = [v.first for v in pair.variables if v.kind == STATE and v.weight != variable.weight]
    is_state = variable.kind == STATE and value.size > 1
    if is_state and any(_same(value, rights[at].get(name)) for name in others):
        return "of another weight"
    return "unlike those of the reference"


def _same(value: np.ndarray, other: Any) -> bool:
    """Returns whether a value is another one but for the last digits."""
    return other is not None and distance(value, other) <= COPIED * EPS * norm(other)


# --- Random numbers and the scale of the loss -----------------------------------------------------


def _other_numbers(pair: Pair) -> Finding | None:
    """Finds shards that draw from other states; only a reference with as many tells theirs."""
    first, second = pair.reference, pair.training
    if len(first.shards) != len(second.shards) or not first.has("random"):
        return None
    wrong, what = list[int](), "not those of the reference"
    for shard in second.shards:
        own = own_states(second, shard) if draws(second, shard) else []
        if own and not same_arrays(own, first.arrays("random")[shard]):
            wrong.append(shard)
            for position, number in enumerate(first.trace.steps):
                if same_arrays(own, Step(first.trace, position).arrays("random")[shard]):
                    what = f"those of step {number} again"
    seen = {"is_resumed": True, "text": f"the random states are {what}"}
    return Finding(RANDOM, ranks=tuple(wrong), seen=seen) if wrong else None


def _other_scale(pair: Pair) -> Finding | None:
    """Finds shards with another scale of the loss."""
    first, second = pair.reference, pair.training
    right = first.trace.loss_scale(first.position, 0)
    own = [second.trace.loss_scale(second.position, shard) for shard in second.shards]
    ranks = tuple(shard for shard, scale in enumerate(own) if scale != right)
    if not ranks:
        return None
    text = f"the loss scale is {own[ranks[0]]:g}, in the reference {right:g}"
    return Finding(GRADIENT, ranks=ranks, seen={"is_resumed": True, "text": text})
