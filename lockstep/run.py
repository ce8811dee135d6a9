"""Runs the checks: every stage of every step of a trace."""

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from lockstep.answer.verdict import NOTHING, STAGES, Finding, Measurement, Verdict, merged
from lockstep.context import Actual, Context
from lockstep.data.trace import OF_GRADIENTS as KINDS_OF_GRADIENTS
from lockstep.data.trace import STATISTIC, WEIGHT, Trace
from lockstep.numeric.arrays import Named, Rows, all_same_bits, are_finite, same_bits
from lockstep.oracles import Batch, Computed, Oracle
from lockstep.recorded import Step
from lockstep.stages.clipping import check_clipping
from lockstep.stages.examples import check_examples
from lockstep.stages.forward import check_forward
from lockstep.stages.loss import check_loss, check_regularisation
from lockstep.stages.random_numbers import check_random_numbers
from lockstep.stages.reduce import check_all_reduce
from lockstep.stages.shard_gradients import check_gradients
from lockstep.stages.start import check_agreement, check_start
from lockstep.stages.statistics import check_statistics
from lockstep.stages.update import check_update, skips_overflow

Check = Callable[[Context], Iterator[Finding | Actual]]
CHECKS: dict[str, Check] = {  # Stage → its check.
    "start": check_start,
    "random numbers": check_random_numbers,
    "examples": check_examples,
    "forward": check_forward,
    "loss": check_loss,
    "regularisation": check_regularisation,
    "gradients": check_gradients,
    "all-reduce": check_all_reduce,  # Before clipping, which compares factors of equal sums only.
    "clipping": check_clipping,
    "update": check_update,
    "statistics": check_statistics,
    "agreement": check_agreement,
}
OF_GRADIENTS = "gradients", "all-reduce", "clipping"  # The stages that a reference judges.
BITWISE = "bitwise equal to one device in float32"
SPREAD = "spread over orders of summation and weights changed by one unit in the last place"

FLOAT64 = f"float64 on one device and the difference of float32 from it; {SPREAD}"


@dataclasses.dataclass
class Result:
    """What the checks of some steps have found; see `Verdict`.

    Attributes:
        trained: name of a weight → whether one of its gradients is not 0.
        idle: number of a step of which nothing can be verified → why.
        exact: position of a step → the shards that are bitwise those of one device.
    """

    findings: list[Finding] = dataclasses.field(default_factory=list)
    measurements: list[Measurement] = dataclasses.field(default_factory=list)
    checked: dict[str, None] = dataclasses.field(default_factory=dict)
    tolerances: set[str] = dataclasses.field(default_factory=set)
    trained: dict[str, bool] = dataclasses.field(default_factory=dict)
    idle: dict[int, str] = dataclasses.field(default_factory=dict)
    exact: dict[int, frozenset[int]] = dataclasses.field(default_factory=dict)


class Proven(NamedTuple):
    """A training of which it is known what is bitwise that of one device.

    Attributes:
        trace: its trace.
        exact: position of a step → such shards; see `Context.exact`.
    """

    trace: Trace
    exact: Mapping[int, frozenset[int]]


def check(
    trace: Trace,
    oracle: Oracle | None = None,
    *,
    batches: Sequence[Any] = (),
    name: str = "",
    reference: str = "",
    on_step: Callable[[int], None] = lambda step: None,
) -> Verdict:
    """Checks every stage of every recorded step.

    Args:
        trace: the trace to check.
        oracle: computes what is right; None to check consistency alone.
        batches: leaves of the global batch of each step as defined by the data set; none to use the
            batches that the shards received.
        name: name of the training.
        reference: the training that it should be; "" without one.
        on_step: called after each step, with its number from 1.

    Raises:
        ValueError: nothing was recorded.
    """
    result = check_steps(trace, oracle, batches, on_step=on_step)
    return verdict_of(trace, result, oracle, name=name, reference=reference)


def check_steps(
    trace: Trace,
    oracle: Oracle | None = None,
    batches: Sequence[Any] = (),
    *,
    proven: Sequence[Proven] = (),
    on_step: Callable[[int], None] = lambda step: None,
) -> Result:
    """Checks every stage of every recorded step; see `check`.

    Args:
        trace, oracle, batches, on_step: see `check`.
        proven: trainings that were checked with the same oracle. A shard with their bits needs not
            be computed again.
    """
    require_steps(trace)
    result = Result()
    for position in range(len(trace.steps)):
        batch = batches[position] if position < len(batches) else None
        check_step(trace, position, oracle, batch, result, proven=proven)
        on_step(position + 1)
    return result


def require_steps(trace: Trace) -> None:
    """Raises a ValueError for a trace without steps."""
    if not trace.steps:
        raise ValueError("nothing was recorded; train within the `with` block of the recorder")


def verdict_of(
    trace: Trace, result: Result, oracle: Oracle | None, *, name: str, reference: str
) -> Verdict:
    """Returns the verdict for what was found."""
    checked = tuple(stage for stage in STAGES if stage in result.checked)
    return Verdict(
        name or trace.name, reference, trace.steps, trace.about.num_replicas,
        merged(result.findings), checked, _tolerance(result, oracle),
        measurements=tuple(result.measurements), framework=trace.about.framework,
        idle=dict(result.idle),
    )  # fmt: skip


def _tolerance(result: Result, oracle: Oracle | None) -> str:
    if oracle is None:
        return "those of float32 sums and updates"
    text = next((each for each in (FLOAT64, BITWISE) if each in result.tolerances), SPREAD)
    return text + (f" (not float64: {oracle.why_not_exact})" if oracle.why_not_exact else "")


def check_step(
    trace: Trace, position: int, oracle: Oracle | None, batch: Batch | None, result: Result, *,
    gradients: Check | None = None, context: Context | None = None, proven: Sequence[Proven] = (),
) -> Context:  # fmt: skip
    """Checks every stage of one step, adds what it finds to a result, and returns the step.

    Args:
        trace: the trace to check.
        position: position of the step in the trace, from 0.
        oracle: computes what is right; None to check consistency alone.
        batch: leaves of the global batch as defined by the data set, if known.
        result: gets the findings.
        gradients: judges the gradients, in place of the checks of `OF_GRADIENTS`.
        context: the step, if it was read before.
        proven: see `check_steps`.
    """
    context = context or Context(trace, position, oracle, batch)
    context.checked = result.checked
    if context.has("before") and not all(map(are_finite, context.named("before"))):
        text = "the step starts from weights that are NaN or infinite, so it cannot be compared"
        result.findings.append(context.found("start", "not_finite", text, status=NOTHING))
        result.idle[context.number] = text
        return context
    if why := why_idle(context, result.trained):
        result.idle[context.number] = why
    # Of trainings that overflow.
    with np.errstate(invalid="ignore", over="ignore", divide="ignore"):
        context.exact = exact_shards(context, proven)
        checks = dict(CHECKS)
        if gradients:
            checks = {s: c for s, c in CHECKS.items() if s not in OF_GRADIENTS[1:]}
            checks["gradients"] = gradients
        for check_stage in checks.values():
            known = list[Actual]()
            for found in check_stage(context):
                if isinstance(found, Finding):
                    context.findings.append(found)
                else:
                    known.append(found)
            context = context.knowing(known) if known else context
    idle = {found.text: None for found in context.findings if found.status == NOTHING}
    if idle:
        result.idle[context.number] = "; ".join(idle)
    result.findings += context.findings
    result.measurements += context.measurements
    result.exact[position] = context.exact
    if context.exact:
        result.tolerances.add(BITWISE)
    if context.uses_float64:
        result.tolerances.add(FLOAT64)
    return context


def _gradients(context: Context) -> Iterator[Named]:
    return itertools.chain.from_iterable(map(context.named, KINDS_OF_GRADIENTS))


def why_idle(context: Context, trained: dict[str, bool]) -> str:
    """Returns why nothing of a step can be verified; "" if a weight is trained.

    Args:
        context: the step.
        trained: name of a weight → whether one of its gradients is not 0; updated.
    """
    if not context.computes and skips_overflow(context):
        return "gradients overflow, and the step is skipped"
    found: dict[str, bool] = {}
    for gradients in _gradients(context):
        for name, gradient in gradients.items():
            values = gradient.values if isinstance(gradient, Rows) else gradient
            found[name] = found.get(name, False) or bool(np.any(values))
    for name, is_trained in found.items():
        trained[name] = trained.get(name, False) or is_trained
    if found:
        return "" if any(found.values()) else "every gradient is 0"
    if not context.has("before", "after"):
        return ""
    weights = context.of_kind(WEIGHT)
    states = zip(context.named("before"), context.named("after"), strict=True)
    is_changed = any(
        not same_bits(before[name], after[name])
        for before, after in states
        for name in weights
        if name in before and name in after
    )
    return "" if is_changed else "no gradient is recorded, and no weight changes"


def exact_shards(context: Context, proven: Sequence[Proven] = ()) -> frozenset[int]:
    """Returns the shards whose results are bitwise those of one device; see `check_steps`."""
    is_recorded = context.has("loss", "raw", "after")
    if not context.computes or context.oracle.synchronized_layers or not is_recorded:
        return frozenset()
    known = {shard for other in proven for shard in _proven_shards(context, other)}
    left = [shard for shard in context.shards if shard not in known]
    asks = [context.ask(shard, scales=(1.0, 1.0)) for shard in left]
    computed = context.oracle.bitwise(asks, sum(context.sizes)) if asks else ()
    pairs = zip(left, computed or (), strict=bool(computed))
    equal = {shard for shard, each in pairs if _is_bitwise(context, shard, each)}
    return frozenset(known | equal)


def _proven_shards(context: Context, other: Proven) -> Iterator[int]:
    """Yields the shards that start and end with the bits of another training, as it should be."""
    step = Step(other.trace, context.position)
    for shard in other.exact.get(context.position, ()):
        if (
            shard in context.shards
            and sum(step.sizes) == sum(context.sizes)
            and all_same_bits(context.state(shard), step.state(shard))
            and all(map(same_bits, context.data[shard], step.data[shard]))
        ):
            loss, y_pred = step.arrays("loss")[shard][0], step.arrays("y_pred")[shard]
            raw, after = step.named("raw")[shard], step.state(shard, "after")
            if _is_bitwise(context, shard, Computed(y_pred, (loss, 0.0), raw, after)):
                yield shard


def _is_bitwise(context: Context, shard: int, computed: Computed) -> bool:
    """Returns whether predictions, loss, gradients and statistics are bitwise those computed."""
    loss = context.arrays("loss")[shard][0]
    right = computed.loss[0] if computed.loss else np.nan
    left = context.state(shard, "after")
    statistics = [name for name in context.of_kind(STATISTIC) if name in computed.after]
    y_pred = context.arrays("y_pred")[shard] if context.has("y_pred") else computed.y_pred
    return (
        all(map(same_bits, y_pred, computed.y_pred))
        and same_bits(loss, np.asarray(right, loss.dtype))
        and all_same_bits(context.named("raw")[shard], computed.raw)
        and all(same_bits(left[name], computed.after[name]) for name in statistics)
    )
