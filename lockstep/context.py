"""A recorded step with everything that its checks need."""

import dataclasses
import functools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from lockstep.arithmetic import (
    MARGIN,
    TINY,
    add_named,
    all_same_bits,
    are_finite,
    dense,
    distance,
    join,
    norm,
    ratio,
    same_bits,
    scaled,
    scaled_all,
)
from lockstep.oracles import Ask, Batch, Computed, Oracle
from lockstep.oracles.rules import RuleOracle
from lockstep.rounding import Spread, measure
from lockstep.trace import CLIP_FIRST, REDUCE_FIRST, STATISTIC, Array, Named, Trace
from lockstep.verdict import BY_DESIGN, FAULT, Finding, Measurement

_LIKE_STALE_AT_FIRST = ("frozen", "lost_replica", "lost_micro_batch", "not_updated")


@dataclasses.dataclass(frozen=True)
class Facts:
    """What the checks of earlier stages have found out about a step.

    Attributes:
        used: the examples of each shard, with the targets that it actually used.
        scales: for each shard, the factors of its data loss and of its regularisation over those
            that the oracle computes for its own examples.
        starts: for each shard, the gradient with respect to its predictions, if it is given.
        off: shards that compute in inference mode.
        drawn_as: shard → shard whose random numbers it uses.
        states: shard → changes of its step: other weights from which it computes.
        exact: shards whose loss, gradients and statistics are bitwise those of one device.
        wrong: stages with a fault that other stages must take into account.
        unknown: stages whose inputs are wrong in an unknown way, so that they cannot be checked.
    """

    used: tuple[Batch, ...]
    scales: tuple[tuple[float, float], ...]
    starts: tuple[Batch | None, ...]
    off: frozenset[int] = frozenset()
    drawn_as: Mapping[int, int] = dataclasses.field(default_factory=dict)
    states: Mapping[int, Mapping[str, Any]] = dataclasses.field(default_factory=dict)
    exact: frozenset[int] = frozenset()
    wrong: frozenset[str] = frozenset()
    unknown: frozenset[str] = frozenset()

    def with_shard(self, shard: int, **values: Any) -> "Facts":
        """Returns the facts with other values of one shard."""
        changed: dict[str, Any] = {
            name: tuple(value if s == shard else old for s, old in enumerate(getattr(self, name)))
            for name, value in values.items()
        }
        return dataclasses.replace(self, **changed)


class Expected(NamedTuple):
    """The step of a shard on one device, and how far rounding reaches."""

    step: Computed
    spread: Spread
    exactly: bool  # Whether the step was computed in float64.


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
        stage: the current stage.
        facts: what earlier stages have found out.
        measurements: every array that was compared with a computed one.
    """

    def __init__(
        self, trace: Trace, position: int, oracle: Oracle | None = None,
        batch: Batch | None = None, checked: dict[str, None] | None = None,
    ):  # fmt: skip
        self.trace, self.position, self.batch = trace, position, batch
        self._oracle, self.checked = oracle, {} if checked is None else checked
        self.number, self.stage = trace.steps[position], "start"
        self.measurements: list[Measurement] = []
        self._named: dict[tuple[str, int], list[Named]] = {}
        self._arrays: dict[str, list[list[Array]]] = {}
        shards = trace.shards
        share = 1 / len(shards) if self.has("loss") else 1.0
        data = self.arrays("data") if self.has("data") else [[] for _ in shards]
        self.base_scales = ((share, share),) * len(shards)  # Of the steps that `expected` computes.
        self.facts = Facts(tuple(data), self.base_scales, (None,) * len(shards))
        self.in_float64 = True  # Until a step turns out to depend on its dtype.
        self.num_in_float64 = 0

    # What was recorded.

    @property
    def oracle(self) -> Oracle:
        """The oracle that computes; only for checks that need one."""
        assert self._oracle is not None
        return self._oracle

    @property
    def computes(self) -> bool:
        """Whether an oracle computes what is right."""
        return self._oracle is not None and self.has("data") and self.has("before")

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

    def has(self, kind: str) -> bool:
        """Returns whether arrays of a kind were recorded in this step."""
        return self.trace.has(self.position, kind)

    def arrays(self, kind: str) -> list[list[Array]]:
        """Returns the arrays of each shard or copy, without those that do not exist."""
        if kind not in self._arrays:
            items = self.trace.items(kind)
            found = [self.trace.arrays(self.position, kind, item) or [] for item in items]
            self._arrays[kind] = [[a for a in each if a is not None] for each in found]
        return self._arrays[kind]

    def named(self, kind: str, position: int | None = None) -> list[Named]:
        """Returns the variables or gradients of each shard or copy, in this step or another."""
        at = self.position if position is None else position
        if (kind, at) not in self._named:
            items = self.trace.items(kind)
            self._named[kind, at] = [self.trace.named(at, kind, item) or {} for item in items]
        return self._named[kind, at]

    def earlier(self, kind: str) -> list[Named] | None:
        """Returns the arrays of all items in the last earlier step that has them."""
        for position in reversed(range(self.position)):
            if self.trace.has(position, kind):
                return self.named(kind, position)
        return None

    @property
    def follows(self) -> bool:
        """Whether the previous step was recorded, too."""
        return self.position > 0 and self.trace.steps[self.position - 1] == self.number - 1

    def state(self, shard: int, position: int | None = None) -> Named:
        """Returns the variables that a shard starts from: those of its copy, its own statistics."""
        at = self.position if position is None else position
        copy = self.named("before", at)[self.trace.copy_of(shard)]
        own = self.named("own_before", at)[shard] if self.trace.has(at, "own_before") else {}
        return copy | own

    def left(self, shard: int) -> Named:
        """Returns the variables after the step of a shard: those of its copy, its statistics."""
        copy = self.named("after")[self.trace.copy_of(shard)]
        return copy | (self.named("own_after")[shard] if self.has("own_after") else {})

    @property
    def data(self) -> list[Batch]:
        """The examples of each shard."""
        return self.arrays("data")

    @property
    def sizes(self) -> list[int]:
        """The number of examples of each shard; 0 where it is unknown."""
        return [sum(map(len, self.inputs(shard))) for shard in self.shards]

    def inputs(self, shard: int) -> list[np.ndarray]:
        """Returns the first leaf of the examples of each forward pass of a shard."""
        if not self.has("data"):
            return []
        data = self.data[shard]
        leaves = len(data) // self.trace.micro_batches(self.position, shard)
        return [array for array in data[:: max(1, leaves)] if array.ndim]

    def joined(self, kind: str, order: Sequence[int] = ()) -> list[np.ndarray]:
        """Returns the concatenated arrays of all shards, in order or in the given order."""
        arrays = [self.arrays(kind)[shard] for shard in order or self.shards]
        return [join(parts) for parts in zip(*arrays, strict=True)]

    @property
    def used_by_all(self) -> Batch:
        """The examples of all shards, with the targets that they used."""
        return [np.concatenate(parts) for parts in zip(*self.facts.used, strict=True)]

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
        if "all-reduce" in self.facts.wrong:  # Nothing is summed.
            return sent[copy]
        return scaled_all(add_named(sent), self.share(0)) if len(sent) > 1 else sent[0]

    def share(self, shard: int) -> float:
        """Returns a shard's share of the sum: 1, or one over the number of shards for a mean."""
        return 1 / len(self.shards) if self.trace.about.reduction == "mean" else 1.0

    # What is right.

    def ask(self, shard: int, **changes: Any) -> Ask:
        """Returns the step of a shard, as the trace has it, for the oracle."""
        facts = self.facts
        state, other = self.state(shard), facts.drawn_as.get(shard)
        if other is not None:
            state = self.with_seeds_of(other, state)
        off = self.modal_layers if shard in facts.off else ()
        scales = self.base_scales[shard]
        usual: dict[str, Any] = {
            "state": state,
            "data": facts.used[shard],
            "scales": scales,
            "off": off,
        }
        usual |= {"starts": facts.starts[shard], "replica": self.trace.replica_of(shard)}
        return Ask(**{**usual, **facts.states.get(shard, {}), **changes})

    @functools.cached_property
    def _expected(self) -> dict[int, Expected]:
        return {}

    def expected(self, shard: int) -> Expected:
        """Returns the step of a shard on one device, for the examples that it was given."""
        if shard not in self._expected:
            ask = self.ask(shard, data=self.data[shard], off=(), state=self.state(shard))
            step, spread, exactly = measure(
                self.oracle, ask, self._variables, seed=self.position, exactly=self.in_float64
            )
            self.in_float64 = self.in_float64 and (exactly or not self.oracle.is_exact)
            self.num_in_float64 += exactly
            self._expected[shard] = Expected(step, spread, exactly)
        return self._expected[shard]

    def set_expected(self, shard: int, expected: Expected) -> None:
        """Sets the step of a shard that was computed together with other shards."""
        self._expected[shard] = expected

    @property
    def _variables(self) -> list[str]:
        """The variables that are rounded: weights and statistics."""
        return self.of_kind("weight", STATISTIC)

    @property
    def computes_in_float64(self) -> bool:
        """Whether the oracle computes gradients in float64."""
        return self.in_float64 and self.oracle.is_exact

    def compute(self, ask: Ask) -> Computed:
        """Computes a step in float64, or in float32 if the code depends on dtypes."""
        return self.oracle.compute(ask, exactly=self.computes_in_float64)

    def gradients(self, shard: int, **changes: Any) -> Named:
        """Returns the expected gradients of a shard: those of its part of its actual loss.

        Args:
            shard: the shard.
            **changes: changes of `ask`: state, data, scales, starts, off.
        """
        scales = changes.pop("scales", self.facts.scales[shard])
        if self.has("loss"):
            return self.compute(self.ask(shard, scales=scales, **changes)).raw
        ask = self.ask(shard, scales=(1.0, 1.0), **changes)
        factor, of_regular = scales
        gradients = {n: scaled(g, factor) for n, g in self.compute(ask).raw.items()}
        if factor == of_regular:
            return gradients
        regular = self.oracle.regular_gradients(ask.state, ask.data)
        return {
            name: dense(g) + (of_regular - factor) * dense(regular[name])
            if np.any(dense(regular.get(name, 0.0)))
            else g
            for name, g in gradients.items()
        }

    def times_base(self, shard: int) -> float:
        """Returns the factor of a shard's gradients over those that `expected` computes."""
        return self.facts.scales[shard][0] / self.base_scales[shard][0]

    def limit(self, shard: int, name: str, value: Array, times: float | None = None) -> float:
        """Returns how far rounding can move a gradient of a shard, as a Euclidean distance.

        Args:
            shard: the shard.
            name: name of the weight.
            value: the gradient.
            times: factor over the gradients of `expected`; None for that of the facts.
        """
        spread = self.expected(shard).spread
        factor = abs(self.times_base(shard) if times is None else times)
        own = factor * spread.gradients.get(name, 0.0)
        return MARGIN * max(own, spread.backward * norm(value)) + TINY

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

    def with_seeds_of(self, other: int, state: Named) -> Named:
        """Returns a state with the initial seeds of another shard."""
        theirs = self.state(other)
        return state | {name: theirs[name] for name in self.of_kind("seed") if name in theirs}

    @property
    def overflows(self) -> list[int]:
        """The shards whose gradients overflow in float16, so that the step should be skipped."""
        if not (self.computes and self.oracle.scales_loss):
            return []
        raw, exact = self.named("raw"), self.facts.exact
        return [
            shard
            for shard in self.shards
            if not (are_finite(raw[shard]) if shard in exact else self.expected(shard).step.raw)
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
        if not (self.has("before") and self.has("after") and self.applied(0)):
            return None
        rule = RuleOracle(self.trace, self.position, self.applied(0))
        return rule if rule.rules else None

    # What was found.

    def mark_checked(self) -> None:
        """Adds the current stage to those that could be checked."""
        self.checked[self.stage] = None

    def found(
        self, cause: str, text: str, *, design: bool = False, stage: str = "",
        kind: str = "raw", items: Iterable[int] = (), tensors: Iterable[str] = (),
        distance: float = 0.0, allowed: float = 0.0,
    ) -> Finding:  # fmt: skip
        """Returns a finding in this step.

        Args:
            cause: a key of `causes.CAUSES`.
            text: one sentence with the numbers.
            design: whether it is by design, not a fault.
            stage: stage of the finding; "" for the current one.
            kind: kind of the arrays that differ; tells what `items` are.
            items: numbers of the shards or copies with the difference; empty for all.
            tensors: names of the variables.
            distance, allowed: relative differences.
        """
        names = tuple(self.trace.name_of(kind, item) for item in items)
        status = BY_DESIGN if design else FAULT
        where = (self.number,), tuple(dict.fromkeys(names)), tuple(tensors)
        # A buffer with the gradients of the previous step holds 0 in the first one.
        is_first = self.position == 0 and cause in _LIKE_STALE_AT_FIRST
        may_be = ("stale_gradient",) if is_first else ()
        return Finding(stage or self.stage, status, cause, text, *where, distance, allowed, may_be)

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


def is_bitwise(context: Context, shard: int, computed: Computed) -> bool:
    """Returns whether predictions, loss, gradients and statistics are bitwise those computed."""
    loss = context.arrays("loss")[shard][0]
    right = computed.loss[0] if computed.loss else np.nan
    left = context.left(shard)
    statistics = [name for name in context.of_kind(STATISTIC) if name in computed.after]
    y_pred = context.arrays("y_pred")[shard] if context.has("y_pred") else computed.y_pred
    return (
        all(map(same_bits, y_pred, computed.y_pred))
        and same_bits(loss, np.asarray(right, loss.dtype))
        and all_same_bits(context.named("raw")[shard], computed.raw)
        and all(same_bits(left[name], computed.after[name]) for name in statistics)
    )
