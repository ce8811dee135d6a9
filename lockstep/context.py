"""A recorded step with what is right in it, and what was found."""

import copy
import dataclasses
import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from lockstep.answer.verdict import FAULT, Finding, Measurement, finding_of
from lockstep.data.trace import SEED, STATISTIC, Trace
from lockstep.numeric.arrays import (
    Array,
    Named,
    add_named,
    all_same_bits,
    are_finite,
    dense,
    distance,
    joined,
    norm,
    ratio,
    scaled_all,
)
from lockstep.oracles import Ask, Batch, Computed, Oracle
from lockstep.oracles.rounding import Expected, OracleBound, measure, widened
from lockstep.oracles.rules import RuleOracle
from lockstep.recorded import Step

_LIKE_STALE_AT_FIRST = ("frozen", "lost_replica", "lost_micro_batch", "not_updated")


class Actual(NamedTuple):
    """What a check found out: a shard computes another step than it should.

    Attributes:
        shard: the shard.
        changes: fields of its `Ask` → other values.
    """

    shard: int
    changes: Mapping[str, Any]


class Context(Step):
    """A recorded step: the argument of each stage's check.

    Args:
        trace: the trace to check.
        position: position of the step in the trace, from 0.
        oracle: computes what is right; None to check consistency alone.
        batch: the global batch that the data set defines, if known.
        checked: stages that were checked in earlier steps; new ones are added.

    Attributes:
        num_absent: number of replicas that have ended before this step.
        findings: what was found in this step so far.
        compared: what was found in comparison with a reference so far.
        reduced_inside: weights whose gradients the optimizer reduces by itself.
        measurements: every array that was compared with a computed one.
        exact: shards whose loss, gradients and statistics are bitwise those of one device.
    """

    def __init__(
        self, trace: Trace, position: int, oracle: Oracle | None = None,
        batch: Batch | None = None, checked: dict[str, None] | None = None,
    ):  # fmt: skip
        absent = trace.absent(position) if oracle is None else []
        if absent:
            trace = trace.without(absent)  # A replica that ends early does not hide the others.
        self.num_absent = len(absent)
        super().__init__(trace, position)
        self._oracle, self.batch = oracle, batch
        self.checked = {} if checked is None else checked
        self.findings: list[Finding] = []
        self.compared: list[Finding] = []
        self.reduced_inside: set[str] = set()
        self.measurements: list[Measurement] = []
        self.exact: frozenset[int] = frozenset()
        self._expected: dict[int, Expected] = {}
        self._together: list[Expected] = []  # The step of all shards, if layers synchronise.

    # What is right.

    @property
    def oracle(self) -> Oracle:
        """The oracle that computes; only for checks that need one."""
        assert self._oracle is not None
        return self._oracle

    @property
    def computes(self) -> bool:
        """Whether an oracle computes what is right."""
        return self._oracle is not None and self.has("data", "before")

    @functools.cached_property
    def right(self) -> list[Ask]:
        """The step that each shard should compute."""
        share = 1 / len(self.shards) if self.has("loss") else 1.0
        return [
            Ask(self.state(s), self.data[s], (share, share), replica=self.trace.replica_of(s))
            for s in self.shards
        ]

    @functools.cached_property
    def actual(self) -> list[Ask]:
        """The step that each shard computes as far as it is known; see `knowing`."""
        return self.right

    def knowing(self, found: Iterable[Finding | Actual]) -> "Context":
        """Returns this step with what is known of its shards; findings change nothing.

        Both share what is computed and found.
        """
        actual = list(self.actual)
        for each in found:
            if isinstance(each, Actual):
                actual[each.shard] = actual[each.shard]._replace(**each.changes)
        other = copy.copy(self)
        other.actual = actual
        return other

    def ask(self, shard: int, **changes: Any) -> Ask:
        """Returns the step that a shard computes, with changes."""
        return self.actual[shard]._replace(**changes)

    @property
    def used(self) -> Batch:
        """The examples of all shards, with the targets that they use."""
        return joined([ask.data for ask in self.actual])

    def expected(self, shard: int) -> Expected:
        """Returns the step that a shard should compute, on one device."""
        if shard in self._expected:
            return self._expected[shard]
        is_first = shard == 0 or bool(self.oracle.synchronized_layers)
        exactly = not self.oracle.why_not_exact if is_first else self.in_float64
        if not self.oracle.synchronized_layers:
            self._expected[shard] = self._measured(self.right[shard], exactly)
        else:
            of_all = self._measured(self.together(self.right), exactly)
            self._together.append(of_all)
            ends = np.cumsum(self.sizes)[:-1]
            for s, after in enumerate(of_all.step.of_parts):
                y_pred = [np.split(array, ends)[s] for array in of_all.step.y_pred]
                step = of_all.step._replace(y_pred=y_pred, after=after)
                self._expected[s] = of_all._replace(step=step)
        return self._expected[shard]

    def widen(self, shard: int) -> OracleBound:
        """Returns the bound of a shard's gradients with what units that turn over can change."""
        y_pred = self.arrays("y_pred")[shard] if self.has("y_pred") else []
        self._expected[shard] = self._widened(self.expected(shard), y_pred)
        return self.bound([shard])

    def _widened(self, expected: Expected, y_pred: Sequence[Array]) -> Expected:
        return widened(self.oracle, self.of_kind("weight", STATISTIC), expected, y_pred)

    def expected_together(self, *, may_widen: bool) -> Iterator[Expected]:
        """Yields the step of all shards, whose layers synchronise; what a bound allows grows.

        First in float32, where no unit turns over if outputs are bitwise identical, then in
        float64, then, where they may, with what units that turn over can change.
        """
        self.expected(0)
        (of_all,) = self._together
        near = of_all.in_float32 or of_all
        yield near.without_ties
        if of_all.in_float32:
            yield of_all.without_ties
        y_pred = joined(self.arrays("y_pred")) if self.has("y_pred") else []
        yield self._widened(near.without_ties, y_pred) if may_widen else of_all

    def together(self, parts: Sequence[Ask]) -> Ask:
        """Returns the step of the whole batch, whose synchronised layers see all shards."""
        return parts[0]._replace(data=self.whole, scales=(1.0, 1.0), parts=tuple(parts))

    @functools.cached_property
    def draws_outside(self) -> bool:
        """Whether code between synchronised layers draws random numbers of its replica.

        The step of the whole batch then is another one than that of the shards together.
        """
        if self.oracle.draws_outside:
            return True
        asks = [self.together(self.right)]
        asks.append(asks[0]._replace(replica=self.right[-1].replica))
        first, last = (self.compute(ask).raw for ask in asks)
        return not all_same_bits(first, last)

    @property
    def uses_float64(self) -> bool:
        """Whether a step of a shard was computed in float64."""
        return any(expected.in_float64 for expected in self._expected.values())

    @property
    def in_float64(self) -> bool:
        """Whether gradients are computed in float64: if shard 0 does not depend on dtypes."""
        return not self.oracle.why_not_exact and self.expected(0).in_float64

    def _measured(self, ask: Ask, exactly: bool) -> Expected:
        variables = self.of_kind("weight", STATISTIC)
        return measure(self.oracle, ask, variables, seed=self.position, exactly=exactly)

    def expected_of(self, ask: Ask) -> Expected:
        """Computes a step, and how far rounding reaches."""
        return self._measured(ask, self.in_float64)

    def compute(self, ask: Ask) -> Computed:
        """Computes a step in float64, or in float32 if the code depends on dtypes."""
        return self.oracle.compute(ask, exactly=self.in_float64)

    def gradients(self, shard: int, **changes: Any) -> Named:
        """Returns the expected gradients of a shard: those of its part of its actual loss.

        Args:
            shard: the shard.
            **changes: changes of `ask`: state, data, scales, starts, off.
        """
        ask = self.ask(shard, **changes)
        if self.has("loss"):
            return self.compute(ask).raw
        factor, of_regular = ask.scales
        gradients = scaled_all(self.compute(ask._replace(scales=(1.0, 1.0))).raw, factor)
        if factor == of_regular:
            return gradients
        regular = self.oracle.regular_gradients(ask.state, ask.data)
        return {
            name: dense(g) + (of_regular - factor) * dense(regular[name])
            if np.any(dense(regular.get(name, 0.0)))
            else g
            for name, g in gradients.items()
        }

    def sum_by_size(self, **changes: Any) -> Named:
        """Returns the sum of the shards' gradients, by their shares of the batch, each alone.

        Args:
            **changes: changes of `ask` for all shards.
        """
        sizes, of_regular = self.sizes, 1 / len(self.shards)
        changes = {"starts": None, **changes}
        return add_named([
            self.gradients(shard, scales=(size / sum(sizes), of_regular), **changes)
            for shard, size in enumerate(sizes)
            if size
        ])  # fmt: skip

    def bound(
        self, shards: Sequence[int], times: float | None = None, steps: Sequence[Expected] = ()
    ) -> OracleBound:
        """Returns how far rounding can move sums of gradients of some shards.

        Args:
            shards: the shards.
            times: factor over the gradients of `expected`; None for that of the first one's loss.
            steps: their steps; empty for `expected`.
        """
        first, *_ = shards
        if times is None:
            times = self.actual[first].scales[0] / self.right[first].scales[0]
        return OracleBound(steps or [self.expected(shard) for shard in shards], times)

    @property
    def modal_layers(self) -> tuple[int, ...]:
        """The layers that behave differently in inference."""
        return (*self.oracle.random_layers, *self.oracle.layers_with_statistics)

    def seeds(self, shard: int) -> Named:
        """Returns the seeds that a shard starts from."""
        state = self.state(shard)
        return {name: state[name] for name in self.of_kind(SEED) if name in state}

    @property
    def overflows(self) -> list[int]:
        """The shards whose gradients overflow in float16, so that the step should be skipped."""
        if not (self.computes and self.oracle.scales_loss):
            return []
        raw = self.named("raw")
        return [
            shard
            for shard in self.shards
            if not (
                are_finite(raw[shard]) if shard in self.exact else self.expected(shard).step.raw
            )
        ]

    def applied(self, copy: int) -> Named:
        """Returns the gradients that a copy applies: what it sends, if nothing is summed."""
        is_sent = self.has(self.kind_sent) and not self.has("sums")
        is_sent = is_sent and not (self.clips_sum and self.has("clipped"))
        if is_sent and self.is_wrong("all-reduce"):
            return self.named(self.kind_sent)[copy]
        return super().applied(copy)

    def updated(self, before: Named, sums: Named, **changes: Any) -> Named:
        """Returns all variables after the optimizer's update; see `Oracle.update`."""
        assert self.updater is not None
        clips = self.clips_sum and not self.has("clipped")
        return self.updater.update(before, sums, **({"clips": clips} | changes))

    @functools.cached_property
    def updater(self) -> Oracle | RuleOracle | None:
        """The oracle that computes updates: by the optimizer's rule if no other one computes."""
        if self.computes:
            return self.oracle
        if not (self.has("before", "after") and self.applied(0)):
            return None
        rule = RuleOracle(self.trace, self.position, self.applied(0))
        return rule if rule.rules else None

    @functools.cached_property
    def _of_elements(self) -> "Context":
        return Context(self.trace.of_elements, self.position, checked=self.checked)

    @property
    def for_rules(self) -> "Context":
        """The step as the rules of optimizers need it: without sums of samples if not linear."""
        is_linear = not isinstance(self.updater, RuleOracle) or self.updater.is_linear
        if is_linear or not self.trace.about.sample:
            return self
        found = self._of_elements
        found.findings, found.compared = self.findings, self.compared
        found.measurements, found.reduced_inside = self.measurements, self.reduced_inside
        return found

    # What was found.

    def mark_checked(self, stage: str) -> None:
        """Adds a stage to those that could be checked."""
        self.checked[stage] = None

    def is_wrong(self, *stages: str) -> bool:
        """Returns whether a stage has a fault, or has a loss of which shards are no parts."""
        return any(
            finding.stage in stages
            and (finding.status == FAULT or finding.detail == "not_a_sum_over_examples")
            for finding in (*self.findings, *self.compared)
        )

    def found(
        self, stage: str, detail: str, text: str, *, status: str = FAULT,
        kind: str = "raw", items: Iterable[int] = (), tensors: Iterable[str] = (),
        distance: float = 0.0, allowed: float = 0.0,
    ) -> Finding:  # fmt: skip
        """Returns a finding in this step.

        Args:
            stage: the node that differs, one of `STAGES`.
            detail: a key of `causes.DETAILS`.
            text: one sentence with the numbers.
            status: `FAULT`, `BY_DESIGN`, `NOT_COMPARED` or `NOTHING`; see `Finding`.
            kind: kind of the arrays that differ; tells what `items` are.
            items: numbers of the shards or copies with the difference; empty for all.
            tensors: names of the variables.
            distance, allowed: relative differences.
        """
        names = [self.trace.name_of(kind, item) for item in items]
        # A buffer with the gradients of the previous step holds 0 in the first one.
        is_first = self.position == 0 and detail in _LIKE_STALE_AT_FIRST
        return finding_of(
            stage, detail, text, (self.number,),
            status=status, items=names, tensors=tensors,
            distance=distance, allowed=allowed, may_be=("stale_gradient",) if is_first else (),
            seen=self._passes,
        )  # fmt: skip

    @property
    def _passes(self) -> str:
        """How the step's gradients were reduced, as a recorder of PyTorch saw it; "" if unknown."""
        about = self.trace.about
        if self.trace.mesh:
            return "mesh" if about.framework == "torch" else ""
        if not about.passes:
            return ""
        passes = about.passes[self.position]
        if not passes:  # Parts of the model are called.
            return "" if about.reduction else "no wrapper"
        return "module" if "module" in passes else passes[-1] or "no wrapper"

    def measure(
        self, stage: str, tensor: str, kind: str, item: int, actual: Array, expected: Array,
        allowed: float, same: bool = False, least: float = 0.0,
    ) -> bool:  # fmt: skip
        """Adds a measurement; returns whether the array is right.

        Args:
            stage: the node that is checked.
            tensor: name of the variable.
            kind: kind of the array.
            item: number of the shard or copy.
            actual, expected: the arrays.
            allowed: Euclidean distance that rounding can cause.
            same: whether the array is known to be bitwise right.
            least: size that the distance is relative to, if the array is smaller.
        """
        where = self.number, stage, tensor, self.trace.name_of(kind, item)
        if same:
            self.measurements.append(Measurement(*where, 0.0, 0.0, True))
            return True
        size, apart = max(norm(expected), least), distance(actual, expected)
        self.measurements.append(Measurement(*where, ratio(apart, size), ratio(allowed, size)))
        return apart <= allowed

    def measure_again(self, known: Measurement, kind: str, item: int) -> None:
        """Adds a measurement for another item, whose array is bitwise equal."""
        self.measurements.append(dataclasses.replace(known, item=self.trace.name_of(kind, item)))
