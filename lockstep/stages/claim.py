"""Compares what a step does to all recorded state, on each copy, with that of a reference.

Other checks explain differences; this one finds what they did not look at. A step takes a state S
to S'. From equal states and examples, each element of S' − S has to agree within rounding, on every
copy; and between two recorded steps, only what changes in the reference may change. The bounds are
those of `bounds`.

State whose parts agree when they are joined in the order of the copies, or that agrees on one copy
at least and whose weight agrees on all copies, is *owned* by a rank: an optimizer that splits its
state over the ranks needs no other copy of it.
"""

import functools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from lockstep.answer.text import count
from lockstep.answer.verdict import BY_DESIGN, FAULT, NOT_COMPARED, Finding
from lockstep.data.trace import STATE, STATISTIC, WEIGHT
from lockstep.explain.kept import slots_of
from lockstep.explain.random_layers import has_keys
from lockstep.explain.tensors import SHORT
from lockstep.numeric import state_bounds as bounds
from lockstep.numeric.arrays import (
    EPS,
    TINY,
    Array,
    Named,
    blocks,
    by_blocks,
    dense,
    distance,
    norm,
    ratio,
    same_bits,
)
from lockstep.numeric.sampling import by_part, with_sums
from lockstep.oracles.rules import IN_GRADIENT, RuleOracle
from lockstep.reference import StepPair
from lockstep.stages.update import check_update, rounding_bounds
from lockstep.step import joined_states

# Stages that come before what the optimizer leaves: an optimizer may reduce gradients itself.
_REDUCTIONS = (
    *("not_all_reduced", "partly_all_reduced", "partial_not_reduced", "unequal_sums"),
    *("lost_replica", "sum_instead_of_mean", "mean_instead_of_sum", "scaled_gradient"),
)
_NEAR_START = 1e-4  # Relative; state that has drifted further is another one.
_OTHER_RULE = 1e-3  # Relative to the variable; far more than an update's rounding.
_TELLING = 16  # Elements that tell the dtype to which they are rounded.
_VISIBLE = 4  # Times its bound, a wrong gradient has to change the state.


class Variable(NamedTuple):
    """A variable of both trainings.

    Attributes:
        first, second: its keys.
        transpose: permutation of the second's axes to those of the first.
        kind: "weight", "statistic" or "optimizer state".
        weight: the reference's name of its weight; "" for statistics and common counters.
    """

    first: str
    second: str
    transpose: tuple[int, ...]
    kind: str
    weight: str

    def as_first(self, array: Array) -> np.ndarray:
        """Returns an array of the second training in the layout of the first."""
        found = dense(array)
        return found.transpose(self.transpose) if found.ndim == len(self.transpose) else found


class Change(NamedTuple):
    """A variable on a copy, compared with the reference.

    Attributes:
        variable: the variable.
        copy: number of the copy.
        share: the largest difference over its bound; None if it was not compared.
        first: by how much the reference changes it.
        num_unknown: number of elements that were not compared, as their gradients are rounding.
        is_kept: whether the step leaves it as it was, or 0, as a rank that does not own it does.
    """

    variable: Variable
    copy: int
    share: float | None
    first: np.ndarray
    num_unknown: int = 0
    is_kept: bool = False

    @property
    def differs(self) -> bool:
        """Whether it was compared, and does not agree."""
        return self.share is not None and not self.share <= 1

    @property
    def is_compared_weight(self) -> bool:
        """Whether it is a weight that was compared, or whose gradients are rounding alone."""
        return self.variable.kind == WEIGHT and (self.share is not None or self.num_unknown > 0)


def _larger_size(
    old: np.ndarray, new: np.ndarray, own_old: np.ndarray, own_new: np.ndarray
) -> np.ndarray:
    """Returns |S| + |S'|, the larger of two trainings."""
    return np.maximum(np.abs(old) + np.abs(new), np.abs(own_old) + np.abs(own_new))


def _largest_share(second: np.ndarray, first: np.ndarray, allowed: np.ndarray) -> float:
    """Returns the largest difference of two changes, over its bound, where that is known."""
    found = 0.0
    for own, other, bound in blocks(second, first, allowed):
        known, gap = np.isfinite(bound), np.abs(own - other)
        gap = np.where(np.isnan(own) & np.isnan(other), 0, np.where(np.isnan(gap), np.inf, gap))
        shares = np.where(known, gap / np.where(known, bound, 1), 0)
        found = max(found, float(np.max(shares, initial=0.0)))
    return found


def variables_of(pair: StepPair) -> list[Variable]:
    """Returns the weights, statistics and optimizer state that both trainings have."""
    kinds, found = pair.first.trace.kinds, list[Variable]()
    for names in pair.matching.pairs:
        kind = kinds[names.first]
        weight = names.first if kind == WEIGHT else ""
        found.append(Variable(*names, kind, weight))
        for keys in slots_of(pair, *names[:2]).values() if weight else ():
            found.append(Variable(*keys, names.transpose, STATE, weight))
    found += [Variable(*keys, (), STATE, "") for keys in slots_of(pair, "", "").values()]
    rates = {key for key, v in pair.first.trace.variables.items() if v.slot == "learning_rate"}
    return [variable for variable in found if variable.first not in rates]


class Claim:
    """Compares the states before and after one step of both trainings.

    Args:
        pair: the step.
        of_any_examples: whether steps with other examples are compared, too.

    Attributes:
        changes: what was compared; empty if the step starts from other states or examples.
    """

    def __init__(self, pair: StepPair, *, of_any_examples: bool = False):
        self.pair = pair
        frameworks = {step.trace.about.framework for step, _ in pair.both}
        is_known = len(frameworks) == 1 and pair.has("before", "after")
        is_known &= pair.starts_equally if of_any_examples else pair.computes_the_same
        self.variables = variables_of(pair) if len(frameworks) == 1 else []
        self.changes = [*self._compare()] if is_known else []

    # What the step does.

    @functools.cached_property
    def _gradients(self) -> list[tuple[Named, Named, set[str]]]:
        """For each copy the gradients that both apply, and the names of those that disagree."""
        found = []
        for copy in self.pair.second.copies:
            terms = self.pair.gradients
            first, second = terms.reference_applied, terms.applied[copy] if terms.names else {}
            found.append((first, second, {*self.pair.tolerance.wrong(second, first)}))
        return found

    def _gradient(self, weight: str, copy: int) -> tuple[Array | None, Array | None, float]:
        """Returns the gradients of a weight, and how far they may differ: 0 if they disagree."""
        first, second, wrong = self._gradients[copy]
        allowed = 0.0 if weight in wrong else self.pair.tolerance.allowed([weight])
        return first.get(weight), second.get(weight), allowed

    def spread(self, variable: Variable, copy: int, shape: tuple[int, ...]) -> np.ndarray:
        """Returns the relative difference of a variable's gradients, for each element."""
        first, second, allowed = self._gradient(variable.weight, copy)
        apart = bounds.distance_of_gradients(first, second, allowed)
        if num_sums := self.pair.first.trace.num_sums(shape):
            first, second = (x if x is None else dense(x)[:-num_sums] for x in (first, second))
        decay = self._decay_in_gradient(variable.weight)
        if num_sums and np.ndim(decay):
            decay = np.asarray(decay)[:-num_sums]
        spread = bounds.spread_of(first, second, allowed, decay)
        if num_sums and spread.shape in ((), (shape[0] - num_sums,)):
            spread = np.broadcast_to(spread, (shape[0] - num_sums,))
            is_linear = variable.kind != WEIGHT or self._is_linear(variable.weight)
            of_sums = apart if is_linear else bounds.spread_of_sums(spread, apart)
            return np.append(spread, np.full(num_sums, of_sums))
        if spread.shape in ((), shape):
            return spread
        # State of another shape, as means of rows.
        return np.asarray(apart)

    def _decay_in_gradient(self, weight: str) -> np.ndarray | float:
        """Returns what the reference's rule adds to the gradient of a weight; 0 if unknown."""
        oracle = self.pair.first.updater
        rule = oracle.rules.get(weight) if isinstance(oracle, RuleOracle) else None
        if rule is None or rule.decay_placement != IN_GRADIENT or not rule.weight_decay:
            return 0.0
        return rule.weight_decay * dense(self.pair.first.named("before")[0].get(weight, 0.0))

    def _is_linear(self, weight: str) -> bool:
        """Returns whether the update of a weight is known to be linear in its gradient."""
        oracle = self.pair.first.updater
        rule = oracle.rules.get(weight) if isinstance(oracle, RuleOracle) else None
        return rule is not None and rule.family == "SGD"

    def _state(self, variable: Variable, copy: int) -> tuple[Array, Array] | None:
        """Returns a variable of a copy before and after the step; 0 before it is created."""
        before, after = self.pair.second.named("before")[copy], self.pair.second.ends[copy]
        if variable.second not in after:
            return None
        new = after[variable.second]
        return before.get(variable.second, np.zeros_like(np.asarray(new))), new

    def _compare(self) -> Iterator[Change]:
        before, after = self.pair.first.named("before")[0], self.pair.first.ends[0]
        for variable in self.variables:
            if variable.first not in after:
                continue
            new = after[variable.first]
            old = before.get(variable.first, np.zeros_like(np.asarray(new)))
            change, known = dense(new) - dense(old), dict[int, Change]()
            for copy in self.pair.second.copies:
                found = self._compare_copy(variable, copy, old, new, change, known.get(0))
                known[copy] = found._replace(is_kept=self._is_kept(variable, copy))
            yield from known.values()

    def _is_kept(self, variable: Variable, copy: int) -> bool:
        state = self._state(variable, copy) if variable.kind == STATE else None
        return state is None or same_bits(*state) or not norm(state[1])

    def _compare_copy(
        self, variable: Variable, copy: int, old: Array, new: Array, first: np.ndarray,
        of_copy_0: Change | None,
    ) -> Change:  # fmt: skip
        """Compares a variable of a copy; one with the bits of copy 0 is compared once."""
        state = self._state(variable, copy)
        if state is None or (
            variable.kind == STATISTIC and copy and self.pair.has_same_shards
        ):  # A reference that ran shard by shard has one set of statistics.
            return Change(variable, copy, None, first)
        zero = None if of_copy_0 is None else self._state(variable, 0)
        if of_copy_0 and zero and all(map(same_bits, state, zero)):
            return of_copy_0._replace(copy=copy)
        if not variable.transpose and all(map(same_bits, state, (old, new))):
            return Change(variable, copy, 0.0, first)
        own = [variable.as_first(each) for each in state]
        if own[0].shape != first.shape:
            own = [*self._joined(variable, first.shape)]
        if not own:
            return Change(variable, copy, np.inf, first)
        if distance(own[0], old) > _NEAR_START * norm(old):
            # Only state can differ here: it is the rank's own, or the step is not comparable.
            is_state = variable.kind == STATE and len(self.pair.second.copies) > 1
            return Change(variable, copy, np.inf if is_state else None, first)
        return self._of_elements(variable, copy, first, own[1] - own[0], [old, new, *own])

    def _of_compensation(self, variable: Variable, size: np.ndarray) -> np.ndarray:
        """Returns the rounding of state that keeps what a weight of 16 bits loses, else 0.

        It is a small difference of the weight's change, whose rounding it has.
        """
        before, after = (
            states.get(variable.weight)
            for states in (self.pair.first.named("before")[0], self.pair.first.ends[0])
        )
        if before is None or after is None or np.shape(after) != size.shape:
            return np.zeros(())
        unit = self._unit_of_weights
        if unit == EPS or np.max(size, initial=0) > 4 * unit * np.max(np.abs(dense(after))):
            return np.zeros(())
        return np.asarray(bounds.COMPUTED * EPS * np.abs(dense(after) - dense(before)))

    @functools.cached_property
    def _unit_of_weights(self) -> float:
        after, kinds = self.pair.first.ends[0], self.pair.first.trace.kinds
        return bounds.unit_of_state(*(a for name, a in after.items() if kinds[name] == WEIGHT))

    @functools.cached_property
    def _of_rule(self) -> Named:
        """How far rounding moves an update that mixes elements, as Muon's, which is in bfloat16."""
        step = self.pair.first
        return rounding_bounds(step, step.named("before")[0], step.applied(0))

    @functools.cached_property
    def _correction(self) -> float:
        """The relative error of Adam's correction of bias, which PyTorch computes in float64."""
        oracle = self.pair.first.updater
        if self.pair.first.trace.about.framework == "torch" or not isinstance(oracle, RuleOracle):
            return 0.0
        rules = [rule for rule in oracle.rules.values() if rule.family == "Adam"]
        betas = {beta for rule in rules for beta in (rule.beta_1, rule.beta_2)}
        return bounds.correction_error(betas, self.pair.second.number + 1)

    def _joined(self, variable: Variable, shape: tuple[int, ...]) -> Sequence[np.ndarray]:
        """Returns a state before and after the step whose parts the copies hold, in their order."""
        states = [self._state(variable, copy) for copy in self.pair.second.copies]
        own = [(variable.as_first(s[0]), variable.as_first(s[1])) for s in states if s]
        return next(iter(joined_states(own, shape)), ()) if len(own) == len(states) else ()

    def _of_elements(
        self, variable: Variable, copy: int, first: np.ndarray, second: np.ndarray,
        states: Sequence[Array],
    ) -> Change:  # fmt: skip
        old, _, own_old, _ = states
        size = by_blocks(_larger_size, *states)
        num_sums = self.pair.first.trace.num_sums(first.shape)
        if variable.kind == STATISTIC:
            number = np.prod(self.pair.first.trace.variables[variable.first].shape)
            of_statistics = functools.partial(
                bounds.of_statistics, allowed=self.pair.tolerance.of_batch,
                least=norm(size[-num_sums:]) / number**0.5 if num_sums else 0.0,
            )  # fmt: skip
            allowed = by_part(of_statistics, num_sums, size)
        else:
            mixes, oracle = 0.0, self.pair.first.updater
            rule = oracle.rules.get(variable.weight) if isinstance(oracle, RuleOracle) else None
            if first.size > 1 and (rule is None or rule.mixes_elements):
                mixes = bounds.distance_of_gradients(*self._gradient(variable.weight, copy))
            stored = [self.pair.first.ends[0][variable.first]]
            other = self.pair.second.ends[copy][variable.second]
            # Digits that only the second training lacks are no rounding of its dtype.
            stored += [other] if other.dtype != stored[0].dtype else []
            unit = bounds.unit_of_state(*stored)
            of_change = functools.partial(
                bounds.of_change, unit=unit, is_weight=variable.kind == WEIGHT, mixes=mixes
            )
            spread = self.spread(variable, copy, first.shape)
            allowed = by_part(of_change, num_sums, first, second, size, spread)
            if self._correction:
                allowed = allowed + with_sums(self._correction * np.abs(first), num_sums)
            if rule and rule.mixes_elements and variable.kind == WEIGHT:
                allowed = allowed + self._of_rule[variable.first]
            if rule is None and variable.kind == STATE:
                allowed = allowed + self._of_compensation(variable, size)
        # Of state that has drifted by rounding.
        if not same_bits(own_old, old):
            allowed = allowed + with_sums(2 * np.abs(dense(own_old) - dense(old)), num_sums)
        share = _largest_share(second, first, allowed)
        moved = self._moved_later(variable, copy) if num_sums else None
        if moved is not None and _largest_share(second - moved, first, allowed) <= 1:
            rounding = with_sums(bounds.STORED * unit * size + TINY, num_sums)
            share = max(share, _largest_share(moved, np.zeros_like(moved), rounding))
        num_unknown = int(np.sum(~np.isfinite(allowed)))
        is_compared = num_unknown < first.size or not first.size
        return Change(variable, copy, share if is_compared else None, first, num_unknown)

    def _moved_later(self, variable: Variable, copy: int) -> np.ndarray | None:
        """Returns by how much only the second script changes a weight after the update.

        None if both do, or none does. Sums of an update that is not linear are known less exactly.
        """
        if variable.kind != WEIGHT:
            return None
        (own, other), names = (self.pair.first, self.pair.second), (variable.first, variable.second)
        if own.ends[0][names[0]] is not own.named("after")[0].get(names[0]):
            return None
        end, after = other.ends[copy][names[1]], other.named("after")[copy].get(names[1])
        is_changed = after is not None and end is not after
        return variable.as_first(end) - variable.as_first(after) if is_changed else None

    @functools.cached_property
    def owned(self) -> set[str]:
        """The second training's names of state that its rank owns."""
        kinds: dict[str, list[Change]] = {}
        for change in self.changes:
            kinds.setdefault(change.variable.first, []).append(change)
        found = set()
        for changes in kinds.values():
            variable = changes[0].variable
            compared = [change for change in changes if change.share is not None]
            of_weight = kinds.get(variable.weight, [])
            is_right = of_weight and not any(x.differs or x.share is None for x in of_weight)
            is_mixed = {change.differs for change in compared} == {True, False}
            is_mixed = is_mixed and all(x.is_kept for x in compared if x.differs)
            is_owned = (is_right and is_mixed) or self._is_part(variable)
            if variable.kind == STATE and is_owned:
                found.add(variable.second)
        return found

    def _is_part(self, variable: Variable) -> bool:
        """Returns whether the copies hold parts of a state that agree when they are joined."""
        return variable.second in self._parts and not any(
            change.differs for change in self.changes if change.variable == variable
        )

    @functools.cached_property
    def _parts(self) -> set[str]:
        """The second training's names of state of which each copy has a part, right or wrong."""
        after, found = self.pair.first.ends[0], set()
        for variable in {x.variable for x in self.changes if x.variable.kind == STATE}:
            state, shape = self._state(variable, 0), np.shape(after[variable.first])
            if state is not None and np.shape(state[1]) != shape:
                found.add(variable.second)
        return found

    @property
    def differing(self) -> list[Change]:
        """What differs from the reference, and is not owned by another rank."""
        return [x for x in self.changes if x.differs and x.variable.second not in self.owned]

    @property
    def is_right(self) -> bool:
        """Whether all that both recordings have was compared, and agrees."""
        return bool(self.changes) and not any(x.differs or x.share is None for x in self.changes)

    def unexplained(self, found: Sequence[Finding]) -> Iterator[Finding]:
        """Finds what differs in a step in which no other check has found a reason.

        Args:
            found: all findings of this step.
        """
        yield from self._tied()
        if any(finding.status == FAULT for finding in found):
            return
        excuses = [each for each in found if each.status in (BY_DESIGN, NOT_COMPARED)]
        if any(finding.stage not in ("statistics", "update") for finding in excuses):
            return  # The gradients differ by design, or were not compared.
        excused = {name for finding in excuses for name in finding.tensors}
        differing = [
            x for x in self.differing if not excused & {x.variable.first, x.variable.second}
        ]
        for kind, stage in ((WEIGHT, "update"), (STATE, "update"), (STATISTIC, "statistics")):
            if changes := [x for x in differing if x.variable.kind == kind]:
                yield self._found(stage, kind, changes)

    def _tied(self) -> Iterator[Finding]:
        """Finds weights that are one weight in one script, and several in the other."""
        steps = [(self.pair.first, "first"), (self.pair.second, "second")]
        for (own, which), (other, _) in (steps, steps[::-1]):
            weights = other.of_kind(WEIGHT)
            for names in own.trace.about.tied:
                apart = [name for name in weights if name in names]
                if len(apart) > 1:
                    text = f"{' and '.join(names)} are one weight in the {which} recording only"
                    yield self.pair.second.found("start", "other_tying", text, tensors=apart)

    def _found(self, stage: str, kind: str, changes: Sequence[Change]) -> Finding:
        worst = max(changes, key=lambda change: change.share or 0)
        names = dict.fromkeys(change.variable.second for change in changes)
        copies = dict.fromkeys(change.copy for change in changes)
        noun = {WEIGHT: "weight", STATE: "array of optimizer state", STATISTIC: "buffer"}[kind]
        noun = noun.replace("array", "arrays") if len(names) > 1 and kind == STATE else noun
        number = f"{len(names)} {noun}" if kind == STATE else count(noun, len(names))
        text = f"the step changes {number} differently from the reference"
        if np.isfinite(worst.share or 0):
            text += f": {worst.variable.second} by {worst.share:.3g} times what rounding allows"
        else:
            text += f": {worst.variable.second} is another state, or has another shape"
        items = copies if len(copies) < len(self.pair.second.copies) else ()
        cause = "unexplained"
        if {*names} <= self.changed_later:
            cause, text = "changed_on_its_own", f"{text}; the script changes it after the update"
            apart = [name for name, *_ in self.pair.second.unlike_first("after") if name in names]
            if later := self._restored(changes):
                cause, text = later[0], f"{text}: {later[1]}"
            elif apart and not self._unlike_in_first(apart):
                cause, text = "diverged_replicas", f"{text}, and each copy differently"
        if kind == WEIGHT and all(map(self._is_unchanged, changes)):
            cause, text = "not_updated", f"{count('weight', len(names))} do not change in this step"
        if kind == STATISTIC and items:
            cause = "diverged_replicas"
        times = {self._times_counted(change) for change in changes}
        if len(times) == 1 and (number_of := times.pop()) > 1:
            counter = worst.variable.second
            cause = "schedule_stepped_too_often"
            text = f"{counter} advances by {number_of} times as much as in the first recording"
        return self.pair.second.found(stage, cause, text, kind="after", items=items, tensors=names)

    def _is_unchanged(self, change: Change) -> bool:
        """Returns whether only the reference changes a variable."""
        state = self._state(change.variable, change.copy)
        return state is not None and same_bits(*state) and bool(np.any(change.first))

    def _restored(self, changes: Sequence[Change]) -> tuple[str, str] | None:
        """Explains variables that a script replaces after the update, as from a checkpoint."""
        pairs = list[tuple[np.ndarray, np.ndarray]]()
        for change in changes:
            name, step = change.variable.second, self.pair.second
            after = step.named("after")[change.copy].get(name)
            if after is None:
                return None
            pairs.append((dense(after), dense(step.ends[change.copy][name])))
        if not any(np.any(end) for _, end in pairs):
            return "reset_state", "it is 0 then"
        for dtype, rounded in SHORT.items():
            is_known = sum(after.size for after, _ in pairs) >= _TELLING
            if is_known and all(same_bits(rounded(after), np.float32(end)) for after, end in pairs):
                return "reduced_precision", f"it is rounded to {dtype}"
        return None

    def _times_counted(self, change: Change) -> int:
        """Returns how many times more a counter of steps advances than in the reference.

        0 if it is no common counter, or if it advances by no multiple.
        """
        variable, state = change.variable, self._state(change.variable, change.copy)
        own, new = self.pair.first.ends[0][variable.first], change.first
        is_counter = variable.kind == STATE and not variable.weight and np.size(own) == 1
        if state is None or not is_counter or not np.all(new > 0):
            return 0
        times = float((dense(state[1]) - dense(state[0])).sum() / new.sum())
        return round(times) if abs(times - round(times)) < _NEAR_START else 0

    def _unlike_in_first(self, names: Sequence[str]) -> bool:
        """Returns whether copies of the reference differ in variables, too."""
        unlike = {name for name, *_ in self.pair.first.unlike_first("after")}
        return any(v.first in unlike for v in self.variables if v.second in names)

    # What S' decides.

    def confirms(self, findings: Sequence[Finding]) -> list[Finding]:
        """Returns the findings that what the step leaves refutes: the optimizer reduces by itself.

        They are refuted only if all state was compared and agrees, if the gradients that look wrong
        would have been visible in it, and if nothing that saturates, as clipping, is in between.
        """
        calls = [
            call for c in self.pair.second.copies
            for call in self.pair.second.trace.calls(self.pair.second.position, c)
        ]  # fmt: skip
        later = [f for f in findings if f.stage == "update" and self._leaves_right(f)]
        later += [
            f for f in findings
            if f.stage == "agreement" and {*f.tensors} <= self.owned | self._parts and f.tensors
        ]  # fmt: skip
        # A step may fold what differs between devices, or examples, into a key that they share.
        if has_keys(self.pair) and self.pair.are_gradients_right:
            later += [f for f in findings if f.detail == "same_random_numbers"]
        if not self.changes or self.differing or any(call.startswith("clip") for call in calls):
            return later
        known = {x.variable.first for x in self.changes if x.share is not None}
        if {x.variable.first for x in self.changes} - known or self.pair.has("unclipped"):
            return later  # State that its owner alone has is compared there.
        refuted = later + [
            f for f in findings
            if f.stage == "update" and (
                (f.detail == "unexplained" and (self.owned or self._has_other_rule({*f.tensors})))
                or self._is_of_both(f)
            )
        ]  # fmt: skip
        wrong = set().union(*(names for *_, names in self._gradients))
        wrong = {v.second for v in self.variables if v.first in wrong}
        if wrong and self._are_visible():
            refuted += [
                f for f in findings
                if f.stage in ("gradients", "all-reduce", "agreement", "loss")
                and f.detail in _REDUCTIONS
                and {*f.tensors} <= wrong
            ]  # fmt: skip
        return [finding for finding in refuted if finding.status == FAULT]

    def _has_other_rule(self, names: set[str]) -> bool:
        """Returns whether the reference's updates are not those of its optimizer's class, either.

        Args:
            names: variables of the second training, whose updates are not.
        """
        step = self.pair.first.for_rules
        if step.updater is None or not names:
            return False
        before, after = step.named("before")[0], step.named("after")[0]
        expected = step.updated(before, step.applied(0))
        of = {variable.second: variable.first for variable in self.variables}
        known = {of[name] for name in names if of.get(name) in expected}
        variables = step.trace.variables
        # Of Adam's first step, the state alone may tell.
        far = {
            weight for key, variable in variables.items() for weight in (key, variable.of)
            if key in expected
            and distance(after[key], expected[key]) > _OTHER_RULE * norm(expected[key])
        }  # fmt: skip
        return len(known) == len(names) and known <= far

    def _is_of_both(self, finding: Finding) -> bool:
        """Returns whether the reference's updates differ in the same way from the recorded rule."""
        of = {variable.second: variable.first for variable in self.variables}
        names = {of.get(name, "") for name in finding.tensors}
        return any(
            each.detail == finding.detail and names and names <= {*each.tensors}
            for each in self._of_reference
        )

    @functools.cached_property
    def _of_reference(self) -> list[Finding]:
        """What the reference's updates show, on their own."""
        return [*check_update(self.pair.first)]

    @property
    def changed_later(self) -> set[str]:
        """The second training's names of what it changes after the update, on some copy."""
        step = self.pair.second
        return {
            name
            for own, after in zip(step.ends, step.named("after"), strict=True)
            for name in own
            if own[name] is not after.get(name)
        }

    def confirms_start(self, finding: Finding) -> bool:
        """Returns whether the next step starts from what this one has left, which is right.

        Args:
            finding: that variables changed between the two steps, of the next one.
        """
        return finding.stage == "start" and self._leaves_right(finding)

    def _leaves_right(self, finding: Finding) -> bool:
        """Returns whether the script has changed what a finding names, after which it is right."""
        wrong = {x.variable.second for x in self.differing}
        names = {*finding.tensors}
        return bool(self.changes and names) and names <= self.changed_later - wrong

    def _are_visible(self) -> bool:
        """Returns whether each gradient that differs would change a state that is linear in it."""
        for copy, (first, second, wrong) in enumerate(self._gradients):
            for weight in wrong:
                apart = ratio(
                    norm(dense(second[weight]) - dense(first[weight])), norm(first[weight])
                )
                effects = [
                    min(apart, 1) * norm(x.first) / self._size(x)
                    for x in self.changes
                    if x.variable.weight == weight and x.copy == copy
                ]
                if not effects or max(effects) < _VISIBLE:
                    return False
        return True

    def _size(self, change: Change) -> float:
        """Returns the norm of the bound of a change whose gradient agrees."""
        before, after = self.pair.first.named("before")[0], self.pair.first.ends[0]
        name = change.variable.first
        size = np.abs(dense(after[name])) + np.abs(dense(before.get(name, 0.0)))
        unit = bounds.unit_of_state(after[name])
        return norm(bounds.STORED * unit * size) + bounds.COMPUTED * unit * norm(change.first)
