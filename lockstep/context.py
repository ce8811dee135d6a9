"""A recorded step with everything that its checks need."""

import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from lockstep.answer.verdict import FAULT, Finding, Measurement, finding_of
from lockstep.data.trace import CLIP_FIRST, REDUCE_FIRST, SEED, STATISTIC, Trace
from lockstep.numeric.arrays import (
    MARGIN,
    TINY,
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
    same_bits,
    scaled_all,
)
from lockstep.oracles import Ask, Batch, Computed, Oracle
from lockstep.oracles.rounding import Expected, measure, widened
from lockstep.oracles.rules import RuleOracle

_LIKE_STALE_AT_FIRST = ("frozen", "lost_replica", "lost_micro_batch", "not_updated")


class Actual(NamedTuple):
    """What a check found out: a shard computes another step than it should.

    Attributes:
        shard: the shard.
        changes: fields of its `Ask` → other values.
    """

    shard: int
    changes: Mapping[str, Any]


class Context:
    """A recorded step: the argument of each stage's check.

    Args:
        trace: the trace to check.
        position: position of the step in the trace, from 0.
        oracle: computes what is right; None to check consistency alone.
        batch: the global batch that the data set defines, if known.
        checked: stages that were checked in earlier steps; new ones are added.

    Attributes:
        number: number of the step, from 0.
        num_absent: number of replicas that have ended before this step.
        stage: the current stage.
        findings: what was found in this step so far.
        compared: what was found in comparison with a reference so far.
        reduced_inside: weights whose gradients the optimizer reduces by itself.
        measurements: every array that was compared with a computed one.
        exact: shards whose loss, gradients and statistics are bitwise those of one device.
        in_float64: whether gradients are computed in float64: until a step depends on its dtype.
    """

    def __init__(
        self, trace: Trace, position: int, oracle: Oracle | None = None,
        batch: Batch | None = None, checked: dict[str, None] | None = None,
    ):  # fmt: skip
        absent = trace.absent(position) if oracle is None else []
        if absent:
            trace = trace.without(absent)  # A replica that ends early does not hide the others.
        self.num_absent = len(absent)
        self.trace, self.position, self.batch = trace, position, batch
        self._oracle, self.checked = oracle, {} if checked is None else checked
        self.number, self.stage = trace.steps[position], "start"
        self.findings: list[Finding] = []
        self.compared: list[Finding] = []
        self.reduced_inside: set[str] = set()
        self.measurements: list[Measurement] = []
        self.exact: frozenset[int] = frozenset()
        self.in_float64 = oracle is not None and not oracle.why_not_exact
        self._arrays: dict[str, list[list[Array]]] = {}
        self._named: dict[str, list[Named]] = {}
        self._expected: dict[int, Expected] = {}

    # What was recorded.

    @property
    def oracle(self) -> Oracle:
        """The oracle that computes; only for checks that need one."""
        assert self._oracle is not None
        return self._oracle

    @property
    def computes(self) -> bool:
        """Whether an oracle computes what is right."""
        return self._oracle is not None and self.has("data", "before")

    @property
    def shards(self) -> range:
        """The numbers of the shards."""
        return self.trace.shards

    @property
    def copies(self) -> range:
        """The numbers of the copies of the weights."""
        return self.trace.copies

    @property
    def has_several(self) -> bool:
        """Whether several shards or copies take part."""
        return len(self.shards) > 1 or len(self.copies) > 1

    def has(self, *kinds: str) -> bool:
        """Returns whether arrays of each kind were recorded in this step."""
        return all(self.trace.has(self.position, kind) for kind in kinds)

    def arrays(self, kind: str) -> list[list[Array]]:
        """Returns the arrays of each shard or copy, without those that do not exist."""
        if kind not in self._arrays:
            items = self.trace.items(kind)
            found = [self.trace.arrays(self.position, kind, item) or [] for item in items]
            self._arrays[kind] = [[array for array in each if array is not None] for each in found]
        return self._arrays[kind]

    def named(self, kind: str) -> list[Named]:
        """Returns the variables or gradients of each shard or copy, by name."""
        if kind not in self._named:
            items = self.trace.items(kind)
            self._named[kind] = [self.trace.named(self.position, kind, i) or {} for i in items]
        return self._named[kind]

    @functools.cached_property
    def ends(self) -> list[Named]:
        """The variables of each copy at the end of the step.

        A script may change them after the update: it averages, sends or clips weights itself.
        """
        later = [self.trace.named(self.position, "left", copy) or {} for copy in self.copies]
        return [own | left for own, left in zip(self.named("after"), later, strict=True)]

    def unlike_first(self, kind: str) -> Iterator[tuple[str, list[int], float]]:
        """Yields name, copies and distance of each variable that differs from that of copy 0."""
        first, *others = self.ends if kind == "after" else self.named(kind)
        for name, value in first.items():
            unlike = {
                copy: distance(other[name], value)
                for copy, other in enumerate(others, start=1)
                if name in other and not same_bits(other[name], value)
            }
            if unlike:
                yield name, list(unlike), ratio(max(unlike.values()), norm(value))

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
        found.stage, found.findings, found.compared = self.stage, self.findings, self.compared
        found.measurements, found.reduced_inside = self.measurements, self.reduced_inside
        return found

    @functools.cached_property
    def previous(self) -> "Context | None":
        """The previous step, if it was recorded, too."""
        if self.position == 0 or self.trace.steps[self.position - 1] != self.number - 1:
            return None
        return Context(self.trace, self.position - 1)

    def state(self, shard: int) -> Named:
        """Returns the variables that a shard starts from: those of its copy, its own statistics."""
        copy = self.named("before")[self.trace.copy_of(shard)]
        return copy | (self.named("own_before")[shard] if self.has("own_before") else {})

    def left(self, shard: int) -> Named:
        """Returns the variables after the step of a shard: those of its copy, its statistics."""
        copy = self.named("after")[self.trace.copy_of(shard)]
        return copy | (self.named("own_after")[shard] if self.has("own_after") else {})

    @functools.cached_property
    def data(self) -> list[Batch]:
        """The examples of each shard."""
        return self.arrays("data") if self.has("data") else [[] for _ in self.shards]

    @property
    def whole(self) -> Batch:
        """The examples of all shards."""
        return joined(self.data)

    @property
    def sizes(self) -> list[int]:
        """The number of examples of each shard; 0 where it is unknown."""
        return [sum(map(len, self.inputs(shard))) for shard in self.shards]

    def inputs(self, shard: int) -> list[np.ndarray]:
        """Returns the first leaf with rows of the examples of each forward pass of a shard."""
        data = self.data[shard]
        leaves = max(1, len(data) // self.trace.micro_batches(self.position, shard))
        first = next((i for i, array in enumerate(data[:leaves]) if array.ndim), 0)
        return [array for array in data[first::leaves] if array.ndim]

    @property
    def kind_of_loss(self) -> str:
        """The kind of the losses: what the shards' steps compute, or only differentiate."""
        return "loss" if self.has("loss") else "objective"

    def of_kind(self, *kinds: str) -> list[str]:
        """Returns the names of the variables of some kinds."""
        return [name for name, kind in self.trace.kinds.items() if kind in kinds]

    @property
    def clips_sum(self) -> bool:
        """Whether gradients are clipped after the sum."""
        return self.trace.about.order == REDUCE_FIRST

    @property
    def kind_sent(self) -> str:
        """The kind of the gradients before the all-reduce."""
        clips_first = self.trace.about.order == CLIP_FIRST
        return "clipped" if clips_first and self.has("clipped") else "raw"

    def applied(self, copy: int) -> Named:
        """Returns the gradients that the optimizer of a copy applies; empty if unknown."""
        for kind in ("clipped", "sums") if self.clips_sum else ("sums",):
            if self.has(kind):
                return self.named(kind)[copy]
        if not self.has(self.kind_sent):
            return {}
        sent = self.named(self.kind_sent)
        if self.is_wrong("all-reduce"):  # Nothing is summed.
            return sent[copy]
        return scaled_all(add_named(sent), self.share(0)) if len(sent) > 1 else sent[0]

    def entering(self, copy: int) -> Named:
        """Returns a copy's gradients before clipping, as the script has left them; {} if unknown.

        A script may divide or sum them itself after the backward pass.
        """
        if own := self.trace.named(self.position, "unclipped", copy):
            return own
        is_known = self.trace.calls(self.position, copy) and self.has("clipped") and self.clips_sum
        return self.named("clipped")[copy] if is_known else {}

    @functools.cached_property
    def changed_by_hand(self) -> Named:
        """The whole gradient before clipping, if the script has changed what the sum gave."""
        entering = self.entering(0)
        if self.has("sums"):
            received = self.named("sums")[0]
        elif self.has("raw") and len(self.shards) == 1:
            received = self.named("raw")[0]
        else:
            return entering
        is_same = all(
            name in received and same_bits(g, received[name]) for name, g in entering.items()
        )
        return {} if is_same else entering

    def share(self, shard: int) -> float:
        """Returns a shard's share of the sum: 1, or one over the number of shards for a mean."""
        return 1 / len(self.shards) if self.trace.about.reduction == "mean" else 1.0

    # What is right.

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
        """The step that each shard computes as far as it is known; see `Actual`."""
        return list(self.right)

    def ask(self, shard: int, **changes: Any) -> Ask:
        """Returns the step that a shard computes, with changes."""
        return self.actual[shard]._replace(**changes)

    @property
    def used(self) -> Batch:
        """The examples of all shards, with the targets that they use."""
        return joined([ask.data for ask in self.actual])

    def expected(self, shard: int) -> Expected:
        """Returns the step that a shard should compute, on one device."""
        if shard not in self._expected and not self.oracle.synchronized_layers:
            self._expected[shard] = expected = self.expected_of(self.right[shard])
            self.in_float64 = expected.in_float64
        elif shard not in self._expected:
            of_all = self.expected_of(self.together(self.right))
            ends = np.cumsum(self.sizes)[:-1]
            for s, after in enumerate(of_all.step.of_parts):
                y_pred = [np.split(array, ends)[s] for array in of_all.step.y_pred]
                step = of_all.step._replace(y_pred=y_pred, after=after)
                self._expected[s] = of_all._replace(step=step)
        return self._expected[shard]

    def widen(self, shard: int) -> None:
        """Measures again how far rounding reaches in the gradients of a shard, with more effort."""
        variables = self.of_kind("weight", STATISTIC)
        y_pred = self.arrays("y_pred")[shard] if self.has("y_pred") else []
        asked = self.oracle, self.right[shard], variables, self.expected(shard), y_pred
        self._expected[shard] = widened(*asked)

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

    def expected_of(self, ask: Ask) -> Expected:
        """Computes a step, and how far rounding reaches."""
        variables = self.of_kind("weight", STATISTIC)
        return measure(self.oracle, ask, variables, seed=self.position, exactly=self.in_float64)

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

    def weighted_sum(self, weights: Sequence[float], off: tuple[int, ...] = ()) -> Named:
        """Returns the sum of the shards' gradients, each multiplied by a weight.

        Args:
            weights: the weights, in place of the factors of the shards' losses.
            off: see `Ask`.
        """
        of_regular, has_loss, parts = 1 / len(self.shards), self.has("loss"), []
        for shard, weight in enumerate(weights):
            if self.sizes[shard]:
                scales = (weight, of_regular) if has_loss else (1.0, 1.0)
                state = self.state(0)
                ask = self.ask(shard, state=state, scales=scales, off=off, starts=None)
                parts.append(scaled_all(self.compute(ask).raw, 1.0 if has_loss else weight))
        return add_named(parts)

    def limit(self, shard: int, name: str, value: Array, times: float | None = None) -> float:
        """Returns how far rounding can move a gradient of a shard, as a Euclidean distance.

        Args:
            shard: the shard.
            name: name of the weight.
            value: the gradient.
            times: factor over the gradients of `expected`; None for that of the shard's loss.
        """
        expected = self.expected(shard)
        if times is None:
            times = self.actual[shard].scales[0] / self.right[shard].scales[0]
        own = abs(times) * expected.gradients.get(name, 0.0)
        return MARGIN * max(own, expected.backward * norm(value)) + TINY

    def near(
        self, shard: int, actual: Named, expected: Named, times: float | None = None
    ) -> list[str]:
        """Returns the names of the gradients that are as expected, within rounding."""
        return [
            name
            for name, value in actual.items()
            if name in expected
            and distance(value, expected[name]) <= self.limit(shard, name, expected[name], times)
        ]

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

    # What was found.

    def mark_checked(self) -> None:
        """Adds the current stage to those that could be checked."""
        self.checked[self.stage] = None

    def is_wrong(self, *stages: str) -> bool:
        """Returns whether a stage has a fault, or has a loss of which shards are no parts."""
        return any(
            finding.stage in stages
            and (finding.status == FAULT or finding.detail == "not_a_sum_over_examples")
            for finding in (*self.findings, *self.compared)
        )

    def found(
        self, detail: str, text: str, *, status: str = FAULT, stage: str = "",
        kind: str = "raw", items: Iterable[int] = (), tensors: Iterable[str] = (),
        distance: float = 0.0, allowed: float = 0.0,
    ) -> Finding:  # fmt: skip
        """Returns a finding in this step.

        Args:
            detail: a key of `causes.DETAILS`.
            text: one sentence with the numbers.
            status: `FAULT`, `BY_DESIGN`, `NOT_COMPARED` or `NOTHING`; see `Finding`.
            stage: stage of the finding; "" for the current one.
            kind: kind of the arrays that differ; tells what `items` are.
            items: numbers of the shards or copies with the difference; empty for all.
            tensors: names of the variables.
            distance, allowed: relative differences.
        """
        names = [self.trace.name_of(kind, item) for item in items]
        # A buffer with the gradients of the previous step holds 0 in the first one.
        is_first = self.position == 0 and detail in _LIKE_STALE_AT_FIRST
        return finding_of(
            stage or self.stage, detail, text, (self.number,),
            status=status, items=names, tensors=tensors,
            distance=distance, allowed=allowed, may_be=("stale_gradient",) if is_first else (),
            seen=self._passes,
        )  # fmt: skip

    @property
    def _passes(self) -> str:
        """How the step's gradients were reduced, as a recorder of PyTorch saw it; "" if unknown."""
        about = self.trace.about
        passes = about.passes[self.position] if about.passes else ()
        if not passes or self.trace.mesh:
            return ""
        return "module" if "module" in passes else passes[-1] or "no wrapper"

    def measure(
        self, tensor: str, kind: str, item: int, actual: Array, expected: Array, allowed: float,
        same: bool = False, least: float = 0.0,
    ) -> bool:  # fmt: skip
        """Adds a measurement; returns whether the array is right.

        Args:
            tensor: name of the variable.
            kind: kind of the array.
            item: number of the shard or copy.
            actual, expected: the arrays.
            allowed: Euclidean distance that rounding can cause.
            same: whether the array is known to be bitwise right.
            least: size that the distance is relative to, if the array is smaller.
        """
        where = self.number, self.stage, tensor, self.trace.name_of(kind, item)
        if same:
            self.measurements.append(Measurement(*where, 0.0, 0.0, True))
            return True
        size, apart = max(norm(expected), least), distance(actual, expected)
        self.measurements.append(Measurement(*where, ratio(apart, size), ratio(allowed, size)))
        return apart <= allowed
