"""Takes the same training in another trace as what is right: names and layouts are matched."""

import dataclasses
import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from lockstep.arithmetic import SMALL_PART, TINY, add, are_finite, dense, distance, norm, ratio
from lockstep.context import Context
from lockstep.match import Matching
from lockstep.oracles.rules import Rule, RuleOracle
from lockstep.trace import STATISTIC, WEIGHT, Named, Trace
from lockstep.verdict import Finding

_SAME_START = 1e-7  # Relative; states that are only transposed have a distance of 0.


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


class Why(NamedTuple):
    """A cause of a difference between two traces.

    Attributes:
        cause: a key of `causes.CAUSES`.
        text: one sentence with the numbers.
        tensors: names of the variables that it explains.
        design: whether it is by design.
        may_be: other causes that explain it in its step as well.
    """

    cause: str
    text: str
    tensors: Sequence[str] = ()
    design: bool = False
    may_be: tuple[str, ...] = ()


class StepPair:
    """One step in two traces.

    Args:
        first: the step in the reference.
        second: the step in the trace that is checked.
        matching: pairs of variables of both traces.
    """

    def __init__(self, first: Context, second: Context, matching: Matching):
        self.first, self.second, self.matching = first, second, matching
        self.number = first.number
        # With their names in sentences, the one that is checked first.
        self.both = (second, "second"), (first, "first")

    def in_second(self, name: str) -> str:
        """Returns the checked trace's name of a variable of the reference; "" without one."""
        return next((p.second for p in self.matching.pairs if p.first == name), "")

    def in_first(self, named: Named) -> Named:
        """Returns arrays of the checked trace with the names and layouts of the reference."""
        return self.matching.to_first(named)

    def _common(self, first: Named, second: Named) -> tuple[Named, Named]:
        other = self.in_first(second)
        names = [name for name in first if name in other]
        return {name: first[name] for name in names}, {name: other[name] for name in names}

    def states(self, kind: str) -> tuple[Named, Named]:
        """Returns weights and statistics, "before" or "after" the step, of copy 0 in both."""
        if not (self.first.has(kind) and self.second.has(kind)):
            return {}, {}
        names = set(self.first.of_kind(WEIGHT, STATISTIC))
        first = {n: a for n, a in self.first.named(kind)[0].items() if n in names}
        return self._common(first, self.second.named(kind)[0])

    def start_distances(self) -> dict[str, float]:
        """Returns name → relative distance of the variables before the step, where there is one."""
        first, second = self.states("before")
        apart = {n: ratio(distance(second[n], first[n]), norm(first[n])) for n in first}
        return {name: far for name, far in apart.items() if far > _SAME_START}

    @property
    def starts_equally(self) -> bool:
        """Whether both traces start the step from the same weights and statistics."""
        return bool(self.states("before")[0]) and not self.start_distances()

    @functools.cached_property
    def gradients(self) -> tuple[Named, Named]:
        """The gradients of the whole batch before clipping in both; empty if not recorded."""
        return self._common(whole_gradient(self.first), whole_gradient(self.second))

    @functools.cached_property
    def applied(self) -> tuple[Named, Named]:
        """The gradients that copy 0 applies in both; empty if not recorded."""
        return self._common(self.first.applied(0), self.second.applied(0))

    def rules(self) -> dict[str, tuple[Rule, Rule]]:
        """Returns name of a weight → rules of the optimizers in both; empty if one is unknown."""
        first, second = self.first.updater, self.second.updater
        if not (isinstance(first, RuleOracle) and isinstance(second, RuleOracle)):
            return {}
        others = {name: second.rules.get(self.in_second(name)) for name in first.rules}
        return {name: (first.rules[name], rule) for name, rule in others.items() if rule}

    def found(self, stage: str, why: Why, distance: float = 0.0, allowed: float = 0.0) -> Finding:
        """Returns a finding on the step."""
        found = self.second.found(
            why.cause, why.text, stage=stage, design=why.design, tensors=why.tensors,
            distance=distance, allowed=allowed,
        )  # fmt: skip
        return dataclasses.replace(found, may_be=(*found.may_be, *why.may_be))


def whole_gradient(context: Context) -> Named:
    """Returns the gradient of the whole batch before clipping, in float64; empty if unknown.

    Prefers the sum of the sent gradients to the received one, which is checked separately.
    """
    kinds: tuple[str, ...] = ("raw", "sums", "clipped")
    if len(context.shards) > 1:
        if context.has("raw") and context.trace.about.reduction:
            sent = context.named("raw")
            names = [n for n in sent[0] if all(n in own for own in sent)]
            return {n: context.share(0) * dense(add([dense(g[n]) for g in sent])) for n in names}
        kinds = ("sums", "clipped")
    for kind in kinds:
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


def common_steps(first: Trace, second: Trace, matching: Matching) -> Iterator[StepPair]:
    """Yields the steps that both traces have; each holds the arrays that were read of it."""
    for number in first.steps:
        if number in second.steps:
            own, other = (Context(trace, trace.steps.index(number)) for trace in (first, second))
            yield StepPair(own, other, matching)
