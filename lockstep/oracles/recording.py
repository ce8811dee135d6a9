"""Takes the same training in another trace as what is right: names and layouts are matched."""

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from lockstep.arithmetic import TINY, add, are_finite, dense, distance, norm, ratio
from lockstep.context import Context
from lockstep.match import Matching, match_variables
from lockstep.trace import STATISTIC, WEIGHT, Named, Trace
from lockstep.verdict import Finding

_SAME_START = 1e-7  # Relative; states that are only transposed have a distance of 0.
# The gradient of a bias before BatchNorm is rounding error only: arrays smaller than this part of
# the largest are measured relative to the largest.
_SMALL_PART = 1e-2


class Tolerance(NamedTuple):
    """The relative difference of gradients that rounding can cause.

    Attributes:
        of_weight: name of the weight in the reference → relative difference.
        usual: relative difference for other weights.
        text: how it was computed.
    """

    of_weight: Mapping[str, float]
    usual: float
    text: str

    def wrong(self, actual: Named, *terms: Named, but: Sequence[str] = ()) -> dict[str, float]:
        """Returns name → relative distance of the arrays that are not the sum of some terms.

        Rounding is relative to each term, as it does not cancel.

        Args:
            actual: the arrays.
            *terms: the terms of the prediction, by name.
            but: names to leave out.
        """
        names = [name for name in actual if name in terms[0] and name not in but]
        parts = {n: [dense(term[n]) for term in terms if n in term] for n in names}
        sizes = {n: sum(map(norm, each)) for n, each in parts.items()}
        least = max(_SMALL_PART * max(sizes.values(), default=0.0), TINY)
        found = {}
        for name in names:
            total = np.sum(parts[name], axis=0)
            apart = ratio(distance(actual[name], total), max(sizes[name], least))
            if not are_finite([dense(actual[name]), total]):
                apart = np.inf
            if apart > self.of_weight.get(name, self.usual):
                found[name] = apart
        return found

    def allowed(self, names: Sequence[str]) -> float:
        """Returns the largest relative difference that rounding can cause in some weights."""
        return max((self.of_weight.get(name, self.usual) for name in names), default=self.usual)


EXACT = Tolerance({}, 0.0, "")


class StepPair:
    """One step in two traces.

    Args:
        first: the step in the reference.
        second: the step in the trace that is checked.
        matching: pairs of variables of both traces.
    """

    def __init__(self, first: Context, second: Context, matching: Matching):
        self.first, self.second, self.matching = first, second, matching
        self._gradients: tuple[Named, Named] | None = None

    @property
    def number(self) -> int:
        """The number of the step, from 0."""
        return self.first.number

    @property
    def both(self) -> tuple[tuple[Context, str], tuple[Context, str]]:
        """The steps with their names in sentences, the one that is checked first."""
        return (self.second, "second"), (self.first, "first")

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

    def gradients(self) -> tuple[Named, Named]:
        """Returns the gradients of the whole batch before clipping; empty if not recorded."""
        if self._gradients is None:
            self._gradients = self._common(whole_gradient(self.first), whole_gradient(self.second))
        return self._gradients

    def applied(self) -> tuple[Named, Named]:
        """Returns the gradients that copy 0 applies in both; empty if not recorded."""
        return self._common(self.first.applied(0), self.second.applied(0))

    def found(self, stage: str, cause: str, text: str, **more: object) -> Finding:
        """Returns a finding on the step; see `Context.found`."""
        return self.second.found(cause, text, stage=stage, **more)  # type: ignore[arg-type]


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


class TraceOracle:
    """Another trace of the training, which is the reference.

    Args:
        reference: the reference.
        trace: the trace to check.
        names: names in one trace → names in the other, where they cannot be matched.

    Attributes:
        matching: pairs of variables of both traces.

    Raises:
        ValueError: the traces have no step or no weight in common.
    """

    def __init__(self, reference: Trace, trace: Trace, names: Mapping[str, str]):
        self._reference, self._trace = reference, trace
        self.matching = match_variables(reference, trace, names)
        self.numbers = [number for number in reference.steps if number in trace.steps]
        if not self.matching.pairs:
            raise ValueError(
                f"{trace.name}: no weight matches one of {reference.name} by name or shape; pass"
                " --name_map"
            )
        if not self.numbers:
            raise ValueError(
                f"{trace.name}: has no step in common with {reference.name}; record the same steps"
            )

    def pairs(self) -> Iterator[StepPair]:
        """Yields the common steps; each holds the arrays that were read of it."""
        for number in self.numbers:
            first, second = (
                Context(trace, trace.steps.index(number))
                for trace in (self._reference, self._trace)
            )
            yield StepPair(first, second, self.matching)
