"""Takes the same training in another trace as what is right: names and layouts are matched."""

import dataclasses
import functools
import itertools
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from lockstep.answer.verdict import Finding
from lockstep.arithmetic import (
    EPS,
    SMALL_PART,
    TINY,
    are_finite,
    dense,
    distance,
    factor_of,
    hashes_of,
    norm,
    plain,
    ratio,
    scaled_all,
)
from lockstep.context import Context
from lockstep.match import Matching
from lockstep.oracles.rules import Rule, RuleOracle
from lockstep.trace import STATISTIC, WEIGHT, Named, Trace

KERNELS = 64 * EPS  # Relative difference of correct kernels of two frameworks.
_CLOSE = 1e-3  # Relative; of factors.
_BEFORE_CLIPPING = ("raw", "sums", "unclipped")  # Kinds of gradients.
_FACTORS = ("scaled_gradient", "sum_instead_of_mean", "mean_instead_of_sum")
SAME_START = 1e-7  # Relative; states that are only transposed have a distance of 0.


@dataclasses.dataclass(frozen=True)
class Tolerance:
    """The relative difference of gradients that rounding can cause.

    Attributes:
        usual: relative difference.
        text: how it was computed.
        of_weight: name of the weight in the reference → its relative difference, if known.
    """

    usual: float
    text: str = ""
    of_weight: Mapping[str, float] = dataclasses.field(default_factory=dict)

    def wrong(self, actual: Named, *terms: Named) -> dict[str, float]:
        """Returns name → relative distance of the arrays that are not the sum of some terms.

        Rounding is relative to each term, as it does not cancel.
        """
        parts = {n: [dense(term[n]) for term in terms if n in term] for n in actual}
        parts = {name: each for name, each in parts.items() if name in terms[0]}
        sizes = {name: sum(map(norm, each)) for name, each in parts.items()}
        least = max(SMALL_PART * max(sizes.values(), default=0.0), TINY)
        found = {}
        for name, each in parts.items():
            total = np.sum(each, axis=0)
            apart = ratio(distance(actual[name], total), max(sizes[name], least))
            if not are_finite([dense(actual[name]), total]):
                apart = np.inf
            if apart > self.allowed([name]):
                found[name] = apart
        return found

    def allowed(self, names: Sequence[str]) -> float:
        """Returns the largest relative difference that rounding can cause in some weights."""
        return max((self.of_weight.get(name, self.usual) for name in names), default=self.usual)

    @property
    def of_batch(self) -> float:
        """The relative difference of a loss, or of the statistics of a batch."""
        return max(self.usual, KERNELS)


class StepPair:
    """One step in two traces; arrays have the names and layouts of the first.

    Args:
        first: the step in the reference.
        second: the step in the trace that is checked.
        matching: pairs of variables of both traces.
        tolerance: tolerance of the gradients.

    Attributes:
        both: the step in the checked trace, then in the reference, each with its name in texts.
        findings: what was found in the comparison so far.
    """

    def __init__(self, first: Context, second: Context, matching: Matching, tolerance: Tolerance):
        self.first, self.second, self.matching = first, second, matching
        self.tolerance = tolerance
        self.both = (second, "second"), (first, "first")
        self.findings: list[Finding] = []

    def has(self, *kinds: str) -> bool:
        """Returns whether arrays of each kind were recorded in both."""
        return self.first.has(*kinds) and self.second.has(*kinds)

    def in_second(self, name: str) -> str:
        """Returns the checked trace's name of a variable of the reference; "" without one."""
        return next((p.second for p in self.matching.pairs if p.first == name), "")

    def _common(self, first: Named, second: Named) -> tuple[Named, Named]:
        other = self.matching.to_first(second)
        names = [name for name in first if name in other]
        return {name: first[name] for name in names}, {name: other[name] for name in names}

    def _common_gradients(self, first: Named, second: Named) -> tuple[Named, Named]:
        """Returns gradients by name; 0 where a loss does not depend on a weight, in one trace."""
        found = first, self.matching.to_first(second)
        listed = [{*step.trace.about.gradients} for step in (self.first, self.second)]
        both: tuple[Named, Named] = {}, {}
        if not all(found):
            return both
        for pair in self.matching.pairs:
            keys = pair.first, pair.second
            if not any(pair.first in own for own in found):
                continue
            if all(pair.first in found[i] or keys[i] in listed[i] for i in (0, 1)):
                shape = next(plain(own[pair.first]).shape for own in found if pair.first in own)
                for own, gradients in zip(found, both, strict=True):
                    gradients[pair.first] = own.get(pair.first, np.zeros(shape))
        return both

    def states(self, kind: str, of_second: str = "") -> tuple[Named, Named]:
        """Returns weights and statistics of a kind, such as "before" the step, of copy 0 in both.

        Args:
            kind: the kind.
            of_second: the kind in the checked trace; "" for the same.
        """
        if not (self.first.has(kind) and self.second.has(of_second or kind)):
            return {}, {}
        names = set(self.first.of_kind(WEIGHT, STATISTIC))
        first = {n: a for n, a in self.first.named(kind)[0].items() if n in names}
        return self._common(first, self.second.named(of_second or kind)[0])

    @functools.cached_property
    def start_distances(self) -> dict[str, float]:
        """Name → relative distance of the variables that differ before the step."""
        first, second = self.states("before")
        apart = {n: ratio(distance(second[n], first[n]), norm(first[n])) for n in first}
        return {name: far for name, far in apart.items() if far > SAME_START}

    @functools.cached_property
    def starts_equally(self) -> bool:
        """Whether all replicas of both start the step from the same weights and statistics."""
        is_known = bool(self.states("before")[0]) and not self.start_distances
        second = self.second
        return is_known and not any(
            second.trace.kinds[name] == WEIGHT for name, *_ in second.unlike_first("before")
        )

    @property
    def computes_the_same(self) -> bool:
        """Whether both traces start from the same state and have the same examples."""
        return self.starts_equally and not self.found_in("examples")

    @functools.cached_property
    def has_same_shards(self) -> bool:
        """Whether the reference ran the model for each part of the batch of the checked trace.

        Layers such as BatchNorm have then seen the same examples in both.
        """
        first, second = self.first, self.second
        if not (first.has("shards", "data") and second.has("data") and len(first.shards) == 1):
            return False
        computed: dict[int, list[int]] = {}
        for inputs, numbers in zip(first.inputs(0), first.arrays("shards")[0], strict=False):
            for row, number in zip(hashes_of([inputs]), numbers.ravel().tolist(), strict=False):
                computed.setdefault(number, []).append(row)
        given = [hashes_of([x]) for shard in second.shards for x in second.inputs(shard) if len(x)]
        return sorted(map(sorted, computed.values())) == sorted(map(sorted, given))

    @functools.cached_property
    def gradients(self) -> tuple[Named, Named]:
        """The gradients of the whole batch before clipping in both; empty if not recorded.

        They are those that a script has divided or summed itself, if the received ones differ.
        """
        both = self.first, self.second
        received = [_whole_gradient(step) for step in both]
        found = self._common_gradients(*received)
        changed = [
            {} if step.is_wrong("all-reduce", "clipping") else step.changed_by_hand for step in both
        ]
        if found[0] and not self.tolerance.wrong(found[1], found[0]):
            return found
        if self.applied[0] and not all(any(map(step.has, _BEFORE_CLIPPING)) for step in both):
            return self.applied  # One script clips by hand.
        if any(changed):
            return self._common_gradients(*(c or r for c, r in zip(changed, received, strict=True)))
        return self._kept_later(found) if any(map(_keeps_by_hand, both)) else found

    def _kept_later(self, found: tuple[Named, Named]) -> tuple[Named, Named]:
        """Returns gradients that a script keeps later, if these are equal, else those `found`.

        Where scripts say themselves what they keep, as for JAX, one of them may divide before the
        sum, and the other one after it, or keep clipped gradients only.
        """
        wrong, (first, second) = self.tolerance.wrong, found
        if self.are_sums_equal:
            return self.sums
        scale = factor_of([*second.values()], [*first.values()])
        is_scaled = np.isfinite(scale) and scale and not wrong(second, scaled_all(first, scale))
        if not (is_scaled and self.applied[0]) or wrong(self.applied[1], self.applied[0]):
            return found
        if not wrong(self.applied[0], first):
            return self.applied
        # Clipping hides any factor, that of a sum over replicas, too. Others are in the loss, too.
        num, of_first = (step.trace.about.num_replicas for step, _ in self.both)
        is_of_replicas = max(scale * of_first / num, num / of_first / scale) < 1 + _CLOSE
        is_of_replicas |= max(scale * num / of_first, of_first / num / scale) < 1 + _CLOSE
        return found if is_of_replicas or not self.has("loss") else self.applied

    @functools.cached_property
    def sums(self) -> tuple[Named, Named]:
        """The gradients that copy 0 has after the sum in both; the sent one of a single replica."""
        received = [
            step.named("sums")[0] if step.has("sums") else _whole_gradient(step)
            for step, _ in reversed(self.both)
        ]
        return self._common_gradients(*received)

    @functools.cached_property
    def are_sums_equal(self) -> bool:
        """Whether each copy receives the gradient of the whole batch, as in the reference."""
        (first, _), second = self.sums, self.second
        return bool(first and second.has("sums") and self.computes_the_same) and not any(
            self.tolerance.wrong(self._common_gradients(first, own)[1], first)
            for own in second.named("sums")
        )

    def remove_false_factors(self) -> list[Finding]:
        """Removes and returns the findings of a factor in the sums, if the sums are right.

        The script then divides the gradients after it has kept those that it sends.
        """
        found = self.second.findings
        if not (_keeps_by_hand(self.second) and self.are_sums_equal):
            return []
        removed = [f for f in found if f.stage == "all-reduce" and f.detail in _FACTORS]
        self.second.findings = [finding for finding in found if finding not in removed]
        return removed

    @functools.cached_property
    def different_gradients(self) -> dict[str, float]:
        """Name → relative distance of the gradients that differ."""
        return self.tolerance.wrong(self.gradients[1], self.gradients[0])

    @functools.cached_property
    def earlier_gradients(self) -> Named:
        """The gradients of the previous step in the reference; empty if it was not recorded."""
        before = self.first.previous
        return _whole_gradient(before) if before else {}

    @functools.cached_property
    def kept_gradients(self) -> Named:
        """The gradients that the checked trace applied in the previous step; empty if unknown.

        A script that does not clear them adds those of the next step.
        """
        before = self.second.previous
        return self.matching.to_first(before.applied(0)) if before else {}

    @functools.cached_property
    def applied(self) -> tuple[Named, Named]:
        """The gradients that copy 0 applies in both; empty if not recorded."""
        return self._common_gradients(self.first.applied(0), self.second.applied(0))

    def rules(self) -> dict[str, tuple[Rule, Rule]]:
        """Returns name of a weight → rules of the optimizers in both; empty if one is unknown."""
        first, second = self.first.updater, self.second.updater
        if not (isinstance(first, RuleOracle) and isinstance(second, RuleOracle)):
            return {}
        others = {name: second.rules.get(self.in_second(name)) for name in first.rules}
        return {name: (first.rules[name], rule) for name, rule in others.items() if rule}

    def found_in(self, stage: str) -> list[Finding]:
        """Returns what was found in a stage."""
        return [finding for finding in self.findings if finding.stage == stage]

    def explained(self, finding: Finding) -> Finding:
        """Returns a finding with the cause of different gradients, if that one is known."""
        causes = self.found_in("gradients")
        if not causes or causes[0].detail == "unexplained":
            return finding
        why = causes[0]
        return dataclasses.replace(finding, status=why.status, detail=why.detail, may_be=why.may_be)


def _keeps_by_hand(context: Context) -> bool:
    """Returns whether a script says itself which gradients are recorded."""
    return context.trace.about.framework == "jax"


def _whole_gradient(context: Context) -> Named:
    """Returns the gradient of the whole batch before clipping, in float64; empty if unknown.

    Prefers the sum of the sent gradients to the received one, which is checked separately. A
    replica that sends no gradient of a weight, because its examples do not use it, adds 0.
    """
    if context.has("raw") and (len(context.shards) == 1 or context.trace.about.reduction):
        total: Named = {}
        for name, gradient in itertools.chain(*(own.items() for own in context.named("raw"))):
            total[name] = total.get(name, 0.0) + dense(gradient)
        return {name: context.share(0) * gradient for name, gradient in total.items()}
    if context.is_wrong("all-reduce", "clipping"):
        return {}  # Each copy has the gradient of its own examples.
    for kind in ("sums", "clipped"):
        if context.has(kind):
            return {name: dense(array) for name, array in context.named(kind)[0].items()}
    return {}


def match_traces(first: Trace, second: Trace, names: Mapping[str, str]) -> Matching:
    """Returns the pairs of variables of two traces.

    Args:
        first: the reference.
        second: the trace to check.
        names: names in one trace → names in the other, where they cannot be matched.

    Raises:
        ValueError: the traces have no step or no weight in common.
    """
    matching = Matching(first, second, names)
    if not matching.pairs:
        raise ValueError(
            f"{second.name}: no weight matches one of {first.name} by name or shape; pass"
            " --name_map"
        )
    if not {*first.steps} & {*second.steps}:
        raise ValueError(
            f"{second.name}: has no step in common with {first.name}; record the same steps"
        )
    return matching


def common_steps(first: Trace, second: Trace) -> Iterator[tuple[Context, Context]]:
    """Yields the steps that both traces have; each holds the arrays that were read of it."""
    for number in first.steps:
        if number in second.steps:
            yield (
                Context(first, first.steps.index(number)),
                Context(second, second.steps.index(number)),
            )
