"""The claim: from equal state and examples, each element of S' − S agrees on every copy.

S is all that lasts: weights, statistics and the state of optimizers. The claim needs no gradient
but for its bound. Optimizer state that agrees on one copy at least and is left alone by the others,
or whose parts agree when they are joined, is *owned* by a rank.

Beside it: where a training starts, and what changes between two steps.
"""

import collections
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from lockstep.data.trace import STATE, STATISTIC, WEIGHT
from lockstep.engine import samples
from lockstep.engine.bounds import wrong_gradients
from lockstep.engine.pair import Pair, State, Variable
from lockstep.numeric import state_bounds as bounds
from lockstep.numeric.arrays import (
    EPS,
    MARGIN,
    TINY,
    Array,
    Lazy,
    Named,
    by_blocks,
    computed,
    dense,
    distance,
    norm,
    norm_of,
    of_each,
    parts_of,
    same_bits,
    same_values,
    stored,
    wide,
)
from lockstep.numeric.sampling import with_sums
from lockstep.numeric.tolerance import MOST_BY_ROUNDING, SMALL_PART, Tolerance
from lockstep.oracles.rules import IN_GRADIENT, SLOTS_OF_RULES, RuleOracle

# State is loaded before each step; what has drifted further than float32's sums is another one.
NEAR_START = 1e-4
# Before the first step, moments are 0 or of one earlier step: below 1 % of the largest they drift.
OTHER_STATE = 0.01
# In steps that are not recorded, rounding moves elements whose gradients are rounding alone; other
# initial values of a distribution are 1.4 times their norm apart.
DRIFTED = 0.1
# Standard deviations that two draws of one distribution are never apart.
BY_CHANCE = 6
# Repetitions of an update with other rounding show its error; the largest of three times this.
OF_REPETITIONS = 8

OfPart = Callable[..., bounds.OfElements]  # Part of both states → what computes its bounds.


class Change(NamedTuple):
    """A variable on a copy, compared with the reference.

    Attributes:
        variable: the variable.
        copy: number of the copy.
        share: the largest difference over its bound; None if it was not compared.
        unknown: number of elements that were not compared, as their gradients are rounding.
        is_kept: whether the copy leaves the variable alone.
    """

    variable: Variable
    copy: int
    share: float | None
    unknown: int = 0
    is_kept: bool = False

    @property
    def differs(self) -> bool:
        """Whether it was compared, and does not agree."""
        return self.share is not None and not self.share <= 1


class Claim:
    """Compares the states before and after one step of both trainings.

    Args:
        pair: the step.
        bound: the bound of its gradients.

    Attributes:
        is_known: whether the step can be compared: both have its states, and begin equally.
        changes: what was compared.
    """

    def __init__(self, pair: Pair, bound: Tolerance) -> None:
        self.pair, self.bound = pair, bound
        self.is_known = pair.has("before", "after") and pair.starts_equally
        self.changes = [*self._compare()] if self.is_known else []

    # What is compared.

    def _compare(self) -> Iterator[Change]:
        for variable in self.pair.variables:
            first, known = self.pair.state(variable), dict[int, Change]()
            if first is None:
                continue
            # A statistic is that of the copy's part, or that of the first copy, as DDP sends it.
            is_of_part = variable.kind == STATISTIC and self.pair.has_same_shards
            for copy in self.pair.copies:
                state = self.pair.state(variable, copy)
                for other in {0} & {*known} if is_of_part else known:
                    before = self.pair.state(variable, other)
                    if state and before and all(map(same_bits, before, state)):
                        known[copy] = known[other]._replace(copy=copy)  # It is compared once.
                        break
                else:
                    right = self.pair.right(variable, copy)
                    known[copy] = self._compare_copy(variable, copy, right, state)
            yield from known.values()

    def _compare_copy(
        self, variable: Variable, copy: int, first: State | None, own: State | None
    ) -> Change:
        of_port = variable.kind == STATE and self.pair.is_port
        if own is None or first is None or of_port:
            is_lost = own is None and variable.kind == WEIGHT and (
                variable.second in self.pair.training.starts[copy]
            )  # fmt: skip
            return Change(variable, copy, np.inf if is_lost else None)
        is_kept = variable.kind == STATE and (same_bits(*own) or not norm(own.new))
        if not variable.transpose and all(map(same_bits, own, first)):
            return Change(variable, copy, 0.0, 0, is_kept)
        own = State(*map(variable.placed, own))
        if np.shape(own.new) != np.shape(first.new):
            joint = joined(variable, self.pair.states(variable)[1], np.shape(first.new))
            if joint is None:
                return Change(variable, copy, np.inf, 0, is_kept)
            own = joint
        if same_bits(own.old, first.old):
            own = own._replace(old=first.old)
        elif distance(own.old, first.old) > NEAR_START * norm(first.old):
            is_lost = variable.kind == STATE and len(self.pair.copies) > 1
            return Change(variable, copy, np.inf if is_lost else None, 0, is_kept)
        share, unknown = self.compared(variable, copy, first, own)
        if share is not None and 1 < share < np.inf:
            share, unknown = self._by_permuting(variable, first, own, share)
        return Change(variable, copy, share, unknown, is_kept)

    def _by_permuting(
        self, variable: Variable, first: State, own: State, share: float
    ) -> tuple[float | None, int]:
        """Returns share and unknown elements of a change, by what permuted examples make of it.

        Without recorded gradients, these alone show how far rounding moves a change, in its norm.
        One that they change as a whole is rounding alone, in this size.
        """
        if variable.kind == STATISTIC or variable.weight in self.pair.names:
            return share, 0
        change = norm(first.change)
        allowed = MARGIN * self.bound.moved(variable.first) * change
        if (variable.weight or variable.first) not in self._near_zero:
            allowed = min(allowed, MOST_BY_ROUNDING * change)
        share = min(share, distance(own.change, first.change) / (allowed + TINY))
        return (None, int(np.size(first.new))) if share <= 1 and allowed >= change else (share, 0)

    @functools.cached_property
    def _near_zero(self) -> set[str]:
        """The weights of which a step changes some state much less than that of others.

        State that belongs to no known weight is compared among itself, without numbers.
        """
        found, sizes = set[str](), dict[str, dict[str, float]]()
        for variable in self.pair.variables:
            state = self.pair.state(variable) if variable.kind in (WEIGHT, STATE) else None
            if state is None:
                continue
            if variable.weight:
                sizes.setdefault(variable.slot, {})[variable.weight] = norm(state.change)
            elif np.ndim(state.new):
                sizes.setdefault("", {})[variable.first] = norm(state.change)
        for of_slot in sizes.values():
            largest = max(of_slot.values())
            found |= {name for name, size in of_slot.items() if size < SMALL_PART * largest}
        return found

    def compared(
        self, variable: Variable, copy: int, first: State, own: State
    ) -> tuple[float | None, int]:
        """Returns the largest difference over its bound, and the number of unknown elements."""
        bound, arrays = self._bound(variable, copy, first, own)
        share, num, unknown = 0.0, 0, 0
        for parts in parts_of(*arrays):
            old, new, own_old, own_new = parts[:4]
            if np.any(np.isfinite(own_new) != np.isfinite(new)):
                return np.inf, 0  # An element is NaN, or overflows, in one of them.
            allowed = bound(*parts)
            num, unknown = num + allowed.size, unknown + int(np.sum(~np.isfinite(allowed)))
            share = np.maximum(share, _largest_share(own_new - own_old, new - old, allowed))
        if num and unknown == num:
            return None, unknown
        if self.pair.is_port and variable.kind == WEIGHT:
            apart = norm_of((x[3] - x[2]) - (x[1] - x[0]) for x in parts_of(*arrays))
            most = norm_of(bound(*parts) for parts in parts_of(*arrays))
            share = min(share, apart / (most + TINY))
        return float(share), unknown

    # How far rounding can move it.

    def allowed(self, variable: Variable, copy: int, first: State, own: State) -> np.ndarray:
        """Returns the bound of |D2 − D1| for each element; infinite where it is not known."""
        bound, arrays = self._bound(variable, copy, first, own)
        return by_blocks(bound, *arrays)

    def _bound(
        self, variable: Variable, copy: int, first: State, own: State
    ) -> tuple[bounds.OfElements, list[Array]]:
        """Returns what computes the bound of some elements, and the arrays that it takes.

        The first are the old and new values of both.
        """
        num_sums = self.pair.reference.trace.num_sums(np.shape(first.new))
        least, unit = 0.0, bounds.unit_of_state(first.new)
        if variable.kind == STATISTIC:
            if num_sums:
                size = _sizes(*map(dense, (*first, *own)))
                least = samples.mean_size(self.pair, variable, size, num_sums)
            of_part: OfPart = functools.partial(self._of_statistic, least=least)
            further: list[Array] = []
        else:
            of_part, further = self._of_change(variable, copy, first, own, unit)
        arrays = [*first, *own, *further]
        if not num_sums:
            return self._with_drift(of_part, arrays), arrays
        allowed = []  # Of the elements of a sample, and of its sums.
        for part in (slice(None, -num_sums), slice(-num_sums, None)):
            each = [wide(array)[part] if np.ndim(array) else array for array in arrays]
            allowed.append(by_blocks(self._with_drift(of_part, each), *each))
        whole = with_sums(np.concatenate(allowed), num_sums)
        return (lambda *arrays: arrays[-1]), [*first, *own, whole]

    @staticmethod
    def _with_drift(of_part: OfPart, arrays: list[Array]) -> bounds.OfElements:
        """Returns what computes the bound of some elements, of states that may have drifted."""
        of_change, (old, _, own_old, *_) = of_part(*arrays[:4]), arrays
        is_same = own_old is old or same_values(own_old, wide(old))

        def of_elements(
            old: np.ndarray, new: np.ndarray, own_old: np.ndarray, own_new: np.ndarray,
            *others: np.ndarray,
        ) -> np.ndarray:  # fmt: skip
            size = _sizes(old, new, own_old, own_new)
            allowed = of_change(size, new - old, own_new - own_old, *others)
            return allowed if is_same else allowed + 2 * np.abs(own_old - old)

        return of_elements

    def _of_statistic(self, *states: Array, least: float) -> bounds.OfElements:
        """Returns what computes the bound of a statistic, one number, from |S| + |S'|."""
        # Frameworks keep variances of n numbers with or without n / (n - 1).
        num = max(sum(self.pair.reference.sizes), 2) if self.pair.is_port else np.inf
        of_batch = max(self.bound.of_batch, 1 / (num - 1))
        usual = norm_of(_sizes(*parts) for parts in parts_of(*states))
        usual /= max(np.size(states[0]), 1) ** 0.5
        number = float(bounds.of_statistics(np.zeros(()), of_batch, max(usual, least)))
        return lambda size, *_: np.full(size.shape, number)

    def _of_change(
        self, variable: Variable, copy: int, first: State, own: State, unit: float
    ) -> tuple[OfPart, list[Array]]:
        """Returns what returns the bound of a part of both states, and the arrays that it takes.

        It is computed from |S| + |S'|, D1, D2 and these arrays.
        """
        rule, is_weight = self.pair.rule(variable.weight), variable.kind == WEIGHT
        gradients = self._gradient(variable.weight, copy)
        mixes = 0.0
        if np.size(first.new) > 1 and (rule is None or rule.mixes_elements):
            mixes = bounds.distance_of_gradients(*gradients)
            if is_weight and np.ndim(first.new) > 1 and self._is_muon(variable):
                mixes = bounds.of_directions(mixes, unit)
        added: Array = 0.0
        if rule is None and not is_weight:
            added = self._of_compensation(variable, first, own)
        if rule is not None and rule.mixes_elements and is_weight:
            added = added + self._of_rule[variable.first]
        if variable.first in self._of_form:
            added = added + self._of_form[variable.first]
        spread, arrays = self._spread(variable, gradients, np.shape(first.new))

        def of_part(old: Array, new: Array, *_: Array) -> bounds.OfElements:
            usual = norm_of(b - a for a, b in parts_of(old, new)) / max(np.size(new), 1) ** 0.5
            bound = bounds.change_by_element(usual, unit, mixes, is_weight=is_weight)

            def of_elements(
                size: np.ndarray, first: np.ndarray, own: np.ndarray, added: np.ndarray,
                *arrays: np.ndarray,
            ) -> np.ndarray:  # fmt: skip
                allowed = bound(first, own, size, spread(*arrays)) + added
                return allowed + self._correction * np.abs(first)

            return of_elements

        return of_part, [added, *arrays]

    def spread(self, variable: Variable, copy: int, shape: tuple[int, ...]) -> np.ndarray:
        """Returns the relative difference of a variable's gradients, for each element."""
        spread, arrays = self._spread(variable, self._gradient(variable.weight, copy), shape)
        return by_blocks(spread, *arrays)

    def _spread(
        self, variable: Variable, gradients: tuple[Array | None, Array | None, float],
        shape: tuple[int, ...],
    ) -> tuple[bounds.OfElements, list[Array]]:  # fmt: skip
        """Returns what computes ρ of some elements, and the arrays that it takes."""
        first, second, allowed = gradients
        rule, decay = self.pair.rule(variable.weight), 0.0
        if rule is not None and rule.decay_placement == IN_GRADIENT:
            decay = rule.weight_decay
        weight = stored(self.pair.weights, variable.weight) if decay else 0.0
        if num_sums := self.pair.reference.trace.num_sums(shape):
            is_linear, own = samples.is_linear(self.pair, variable), decay * wide(weight)
            of_sample = first, second, allowed, own, num_sums
            return np.asarray, [samples.spread_of(*of_sample, is_linear=is_linear)]
        if first is None or second is None:
            return np.asarray, [0.0]
        if np.shape(first) not in ((), shape):  # State of another shape, as means of rows.
            return np.asarray, [bounds.distance_of_gradients(first, second, allowed)]
        of_elements = bounds.spread_by_element(first, allowed)

        def with_decay(first: np.ndarray, second: np.ndarray, weight: np.ndarray) -> np.ndarray:
            return of_elements(first, second, decay * weight)

        return with_decay, [first, second, weight]

    def _gradient(self, weight: str, copy: int) -> tuple[Array | None, Array | None, float]:
        """Returns the gradients of a weight, and how far they may differ: 0 if they disagree.

        Beside a wrong gradient, one that is 0 in the reference says nothing of its elements.
        """
        first, second, wrong = self._gradients[copy]
        right, own = (stored(x, weight) if weight in x else None for x in (first, second))
        if weight in wrong:
            return (right, own, 0.0) if np.any(right) else (None, None, 0.0)
        return right, own, self.bound.allowed([weight])

    @functools.cached_property
    def _gradients(self) -> list[tuple[Named, Named, set[str]]]:
        """For each copy the gradients that both used, and the names of those that disagree."""
        pair = self.pair
        right, copies = pair.right_used, pair.used
        wrong = of_each(lambda own: wrong_gradients(own, right, self.bound, pair), copies)
        return [(right, *each) for each in zip(copies, wrong, strict=True)]

    @functools.cached_property
    def _correction(self) -> float:
        """The relative error of Adam's correction of bias, which PyTorch computes in float64."""
        if self.pair.reference.trace.about.framework == "torch" or not self.pair.oracle:
            return 0.0
        rules = [rule for rule in self.pair.oracle.rules.values() if rule.family == "Adam"]
        betas = {beta for rule in rules for beta in (rule.beta_1, rule.beta_2)}
        return bounds.correction_error(betas, self.pair.number + 1)

    def _is_muon(self, variable: Variable) -> bool:
        """Whether an optimizer with the name of Muon updates a weight, of which it keeps one mean.

        Those of which it keeps two, as of embeddings, have Adam's rule in it.
        """
        about, position = self.pair.reference.trace.about, self.pair.reference.position
        groups = about.settings[position] if about.settings else ()
        own = [g.get("optimizer", "") for g in groups if variable.first in g.get("weights", ())]
        names = str([about.optimizer.get("class"), *own]).lower()
        kept = [v for v in self.pair.variables if v.kind == STATE and v.weight == variable.first]
        states = [self.pair.state(v) for v in kept] if "muon" in names else []
        return "muon" in names and sum(x is not None and np.ndim(x.new) > 1 for x in states) < 2

    @functools.cached_property
    def _of_rule(self) -> Named:
        """How far rounding moves an update that mixes elements, as Muon's, which is in bfloat16."""
        before, used = self.pair.reference.starts[0], self.pair.reference.applied(0)
        oracle, generator = self.pair.oracle, np.random.default_rng(0)
        if oracle is None:
            return {}
        right, far = oracle.update(before, used), dict[str, float]()
        for _ in range(3):
            for name, new in oracle.rounded(generator).update(before, used).items():
                gap = float(np.max(np.abs(dense(new) - dense(right[name])), initial=0.0))
                far[name] = max(far.get(name, 0.0), OF_REPETITIONS * gap)
        return far

    @functools.cached_property
    def _of_form(self) -> Named:
        """How far another form of the reference's rule, as in the training, moves variables.

        The fused kernel of a GPU has betas of float32. PyTorch and Optax add epsilon to the root
        after they correct the bias, Keras before.
        """
        pair, oracle, far = self.pair, self.pair.oracle, Named()
        if oracle is None:
            return far
        step = pair.training
        own = RuleOracle(step.trace, step.position, step.applied(0)).rules.values()
        known = {rule.betas_in for rule in oracle.rules.values()}
        forms: list[dict[str, Any]] = [
            {"betas_in": dtype} for dtype in {rule.betas_in for rule in own} - known
        ]
        if pair.is_port:
            places = {rule.epsilon_placement for rule in own}
            forms += [{"epsilon_placement": place} for place in places]
        before, used = pair.reference.starts[0], pair.reference.applied(0)
        weights = {v.first: v.weight for v in pair.variables if v.weight in oracle.rules}

        def moved(name: str, form: dict[str, Any]) -> np.ndarray:
            given = before, {weights[name]: stored(used, weights[name])}
            right, other = oracle.update(*given)[name], oracle.update(*given, **form)[name]
            return np.abs(dense(other) - dense(right))

        names = [name for name, weight in weights.items() if name in before and weight in used]
        for form in forms:
            far |= computed(names, functools.partial(moved, form=form)).sources()
        return Lazy(far)

    def _of_compensation(self, variable: Variable, first: State, own: State) -> np.ndarray | float:
        """Returns the rounding of state that keeps what a weight of 16 bits loses, else 0."""
        weight = next((v for v in self.pair.variables if v.first == variable.weight), None)
        state, unit = self.pair.state(weight) if weight else None, self._unit_of_weights
        if state is None or unit == EPS or np.shape(state.new) != np.shape(first.new):
            return 0.0
        largest = np.max(np.abs(dense(state.new)), initial=0)
        is_small = np.max(_sizes(*map(dense, (*first, *own))), initial=0) <= 4 * unit * largest
        return np.asarray(bounds.COMPUTED * EPS * np.abs(state.change)) if is_small else 0.0

    @functools.cached_property
    def _unit_of_weights(self) -> float:
        """The unit of the reference's weights; those of a few elements alone cannot tell it."""
        ends, kinds = self.pair.reference.ends[0], self.pair.reference.trace.kinds
        units = (bounds.unit_of_state(a) for name, a in ends.items() if kinds[name] == WEIGHT)
        return max(units, default=EPS)

    # What it says.

    @functools.cached_property
    def owned(self) -> set[str]:
        """The reference's names of optimizer state that some rank owns."""
        found, by_name = set[str](), dict[str, list[Change]]()
        for change in self.changes:
            by_name.setdefault(change.variable.first, []).append(change)
        for name, changes in by_name.items():
            of_weight = by_name.get(changes[0].variable.weight, [])
            is_right = of_weight and not any(x.differs or x.share is None for x in of_weight)
            compared = [x for x in changes if x.share is not None]
            is_mixed = {x.differs for x in compared} == {True, False}
            others_keep = all(x.is_kept for x in compared if x.differs)
            if changes[0].variable.kind == STATE and is_right and is_mixed and others_keep:
                found.add(name)
        return found

    @property
    def wrong(self) -> list[Change]:
        """What differs from the reference, and is not owned by another rank."""
        return [x for x in self.changes if x.differs and x.variable.first not in self.owned]

    @property
    def holds(self) -> bool:
        """Whether all that was compared agrees, and something was."""
        return bool(self.changes) and not self.wrong

    @property
    def num_unknown(self) -> int:
        """The number of elements that were not compared on the first copy."""
        return sum(x.unknown for x in self.changes if x.copy == 0)

    def is_left_wrong(self, change: Change) -> bool:
        """Returns whether a wrong change happens after a right update.

        State that the reference changes after its update, too, is kept by the step, as an average.
        """
        variable, copy = change.variable, change.copy
        after = self.pair.reference.named("after")[0], self.pair.training.named("after")[copy]
        left = self.pair.reference.left[0], self.pair.training.left[copy]
        if variable.first not in after[0] or variable.second not in after[1]:
            return False
        is_changed = variable.first in left[0], variable.second in left[1]
        if not any(is_changed) or (is_changed[0] and variable.kind != WEIGHT):
            return False
        first, of_copy = self.pair.right(variable, copy), self.pair.state(variable, copy)
        if first is None or of_copy is None:
            return False
        if is_changed[0]:
            first = State(first.old, after[0][variable.first])
        new = after[1][variable.second]
        own = State(variable.as_first(of_copy.old), variable.as_first(new))
        if np.shape(own.new) != np.shape(first.new):
            return False
        share, _ = self.compared(variable, copy, first, own)
        return share is not None and share <= 1


def _sizes(
    old: np.ndarray, new: np.ndarray, own_old: np.ndarray, own_new: np.ndarray
) -> np.ndarray:
    """Returns |S| + |S'|, the larger of both trainings."""
    return np.maximum(np.abs(old) + np.abs(new), np.abs(own_old) + np.abs(own_new))


def _largest_share(second: np.ndarray, first: np.ndarray, allowed: np.ndarray) -> float:
    """Returns the largest difference of two changes over its bound, where that is known."""
    gap = np.abs(second - first)
    if not np.isnan(share := float(np.max(gap / allowed, initial=0.0))):
        return share
    gap = np.where(np.isnan(second) & np.isnan(first), 0, np.where(np.isnan(gap), np.inf, gap))
    known = np.isfinite(allowed)
    return float(np.max(np.where(known, gap / np.where(known, allowed, 1), 0), initial=0.0))


def joined(
    variable: Variable, copies: Sequence[State | None], shape: tuple[int, ...]
) -> State | None:
    """Returns a state whose parts the copies hold, in their order; None if they do not fit."""
    known = [state for state in copies if state is not None]
    if len(known) < len(copies):
        return None
    parts = [[variable.as_first(state[i]) for state in known] for i in (0, 1)]
    own = parts[0][0].shape
    axes = [i for i in range(len(shape)) if len(own) == len(shape) and own[i] != shape[i]]
    if len(axes) != 1:
        return None
    others = {(*x.shape[: axes[0]], *x.shape[axes[0] + 1 :]) for x in parts[0]}
    if len(others) > 1:
        return None
    old, new = (np.concatenate(each, axes[0]) for each in parts)
    return State(old, new) if old.shape == new.shape == shape else None


# --- Where training starts, and between two steps -------------------------------------------------


class Moved(NamedTuple):
    """A variable with another value than the reference's, at the start or between two steps.

    Attributes:
        variable: the variable.
        copies: the copies with another value.
        is_own: whether the copies have different values.
        is_zero: whether it is 0 or missing.
    """

    variable: Variable
    copies: tuple[int, ...]
    is_own: bool
    is_zero: bool


def other_starts(pair: Pair, bound: Tolerance) -> Iterator[Moved]:
    """Yields what starts from other values than in the reference, at the first recorded step."""
    if pair.is_port or not pair.has("before"):
        return
    starts, first = pair.training.own_starts, pair.reference.named("before")[0]
    largest = dict[str, float]()  # Slot → norm of its largest state of a weight.
    for variable in pair.variables:
        if variable.kind == STATE and variable.first in first:
            size = max(largest.get(variable.slot, 0.0), norm(first[variable.first]))
            largest[variable.slot] = size
    for variable in pair.variables:
        of_state = variable.kind == STATE
        if variable.first not in first:
            continue
        right = wide(first[variable.first])
        allowed = max(NEAR_START, bound.usual) * norm(right)
        if of_state:
            size = largest.get(variable.slot, 0.0) if variable.weight else norm(right)
            allowed = OTHER_STATE * size
        wrong = []
        for copy, array in enumerate(_starts(variable, starts, right)):
            if array.shape == right.shape and distance(array, right) > allowed:
                wrong.append(copy)
        if not wrong:
            continue
        is_owned = variable.kind != WEIGHT and len(wrong) < len(starts)
        if is_owned and all(stays_zero(pair, variable, copy) for copy in wrong):
            continue  # Another rank has it.
        own = next(_starts(variable, starts, right))
        is_own = not all(same_values(own, x) for x in _starts(variable, starts, right))
        if variable.slot not in SLOTS_OF_RULES and variable.weight and of_state and is_own:
            continue  # Each rank has its own, as the residuals of a compressed reduction.
        sizes = [norm(array) for array in _starts(variable, starts, right)]
        yield Moved(variable, tuple(wrong), is_own, not any(sizes[copy] for copy in wrong))


def has_drifted(pair: Pair) -> bool:
    """Returns whether steps before the first recorded one may have led to its other start.

    All weights together are near the reference's on each copy, and so is all state of a slot.
    """
    first, groups = pair.reference.named("before")[0], collections.defaultdict(list)
    for variable in pair.variables:
        if variable.kind != STATISTIC and variable.first in first:
            right = wide(first[variable.first])
            for copy, own in enumerate(_starts(variable, pair.training.own_starts, right)):
                far = distance(own, right) if own.shape == right.shape else math.inf
                groups[copy, variable.kind, variable.slot].append((far, norm(right)))
    sizes = ([math.hypot(*column) for column in zip(*own, strict=True)] for own in groups.values())
    return pair.number > 0 and all(far <= DRIFTED * size for far, size in sizes)


def _starts(variable: Variable, starts: Sequence[Named], right: np.ndarray) -> Iterator[np.ndarray]:
    """Yields a variable of each copy before the first step; 0 where it has none."""
    for own in starts:
        key = variable.second
        yield variable.placed(own[key]) if key in own else np.zeros_like(right)


def stays_zero(pair: Pair, variable: Variable, copy: int) -> bool:
    """Returns whether a copy has no state of its own, before and after the step."""
    states = pair.training.own_starts[copy], pair.training.ends[copy]
    return not any(variable.second in own and norm(own[variable.second]) for own in states)


def drawn_otherwise(pair: Pair) -> list[str]:
    """Returns weights of a port that are drawn from another distribution, by their size.

    The root mean square of n numbers of one distribution is known to 1/√n, as those of two draws.
    """
    found = []
    first, own = pair.reference.named("before")[0], pair.training.own_starts[0]
    for variable in pair.variables:
        if variable.kind == WEIGHT and variable.first in first and variable.second in own:
            sizes = norm(first[variable.first]), norm(own[variable.second])
            far = abs(np.log(sizes[1] / sizes[0])) if all(sizes) else np.inf * any(sizes)
            if far > BY_CHANCE / np.size(first[variable.first]) ** 0.5:
                found.append(variable.first)
    return found


def changed_between(previous: Claim, pair: Pair) -> Iterator[Moved]:
    """Yields what changes between two steps, and not so in the reference.

    What does not change there may change no bit; what does has to change equally within rounding,
    which is known of a step that starts equally.
    """
    about = pair.training.trace.about
    has_own = about.replayed is None or pair.training.has("replaced")
    is_known = has_own and pair.training.previous and pair.reference.previous
    if pair.reference.trace.about.replayed or not is_known:
        return
    starts, earlier = pair.training.own_starts, previous.pair
    for variable in pair.variables:
        ends, start = earlier.reference.ends[0], pair.reference.named("before")[0]
        stays, wrong = _stays(ends, start, variable.first), list[int]()
        for copy in pair.copies:
            if stays and _stays(earlier.training.ends[copy], starts[copy], variable.second):
                continue
            first = _moved(ends, start, variable.first)
            own = _moved(earlier.training.ends[copy], starts[copy], variable.second)
            if own is None or first is None or _is_broadcast(variable, copy, starts):
                continue
            if not previous.is_known and np.any(first[0]):
                continue
            changes = np.any(own[0]) or np.any(first[0])
            if changes and _differ(previous, variable, copy, first, own[0]):
                wrong.append(copy)
        if wrong:
            new = [starts[copy].get(variable.second) for copy in pair.copies]
            is_own = any(x is None or new[0] is None or not same_bits(new[0], x) for x in new)
            is_zero = not any(norm(x) for c in wrong if (x := new[c]) is not None)
            yield Moved(variable, tuple(wrong), is_own, is_zero and variable.kind == STATE)


def _stays(end: Named, start: Named, key: str) -> bool:
    """Returns whether a variable is known between two steps, and does not change."""
    return key in end and key in start and same_bits(start[key], end[key])


def _moved(end: Named, start: Named, key: str) -> tuple[np.ndarray, np.ndarray] | None:
    """Returns the change of a variable between two steps, and its size; None if it is unknown."""
    if key not in end or not start:
        return None
    old = dense(end[key])
    if key in start and same_bits(start[key], end[key]):
        return np.zeros_like(old), np.abs(old)  # Also of elements that are not finite.
    new = dense(start[key]) if key in start else np.zeros_like(old)
    return (new - old, np.abs(old)) if new.shape == old.shape else None


def _is_broadcast(variable: Variable, copy: int, starts: Sequence[Named]) -> bool:
    """Returns whether a buffer has the value of copy 0, which DDP sends to all before a step."""
    key = variable.second
    is_known = variable.kind == STATISTIC and copy and key in starts[0] and key in starts[copy]
    return bool(is_known) and same_bits(starts[0][key], starts[copy][key])


def _differ(
    previous: Claim, variable: Variable, copy: int, first: tuple[np.ndarray, np.ndarray],
    second: np.ndarray,
) -> bool:  # fmt: skip
    """Returns whether a change between two steps is not that of the reference."""
    (change, size), second = first, variable.as_first(second)
    if change.shape != second.shape:
        return False  # A part, which its rank owns.
    if not np.any(change):
        return bool(np.any(second))
    spread = previous.spread(variable, copy, change.shape)
    allowed = bounds.of_start(change, size, spread)
    return not bool(np.all(np.abs(second - change) <= allowed + TINY))
