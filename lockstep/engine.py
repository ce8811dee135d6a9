"""Runs the checks: every stage of every step of a trace."""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from lockstep.arithmetic import are_finite
from lockstep.checks.agreement import check_agreement
from lockstep.checks.all_reduce import check_all_reduce
from lockstep.checks.clipping import check_clipping
from lockstep.checks.examples import check_examples
from lockstep.checks.forward import check_forward
from lockstep.checks.gradients import check_gradients
from lockstep.checks.loss import check_loss, check_regularisation
from lockstep.checks.random_numbers import check_random_numbers
from lockstep.checks.start import check_start
from lockstep.checks.statistics import check_statistics
from lockstep.checks.update import check_update
from lockstep.checks.whole_loss import starts_of
from lockstep.context import Context, Expected, Facts, is_bitwise
from lockstep.oracles import Batch, Oracle
from lockstep.rounding import repeated_spread
from lockstep.trace import Trace
from lockstep.verdict import STAGES, Finding, Measurement, Verdict, merged

Check = Callable[[Context], Iterator[Finding | Facts]]
CHECKS: dict[str, Check] = {  # Stage → its check, in the order of the data.
    "start": check_start,
    "random numbers": check_random_numbers,
    "examples": check_examples,
    "forward": check_forward,
    "loss": check_loss,
    "regularisation": check_regularisation,
    "gradients": check_gradients,
    "clipping": check_clipping,
    "all-reduce": check_all_reduce,
    "update": check_update,
    "statistics": check_statistics,
    "agreement": check_agreement,
}
BITWISE = "bitwise equal to one device in float32"
SPREAD = "spread over orders of summation and weights changed by one unit in the last place"


@dataclasses.dataclass
class Result:
    """What the checks of some steps have found; see `Verdict`."""

    findings: list[Finding] = dataclasses.field(default_factory=list)
    measurements: list[Measurement] = dataclasses.field(default_factory=list)
    checked: dict[str, None] = dataclasses.field(default_factory=dict)
    num_bitwise: int = 0
    num_in_float64: int = 0

    def add(self, findings: Sequence[Finding]) -> None:
        """Adds findings, for example of checks that are not about one step."""
        self.findings += findings
        self.checked |= dict.fromkeys(finding.stage for finding in findings)


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
    result = check_steps(trace, oracle, batches, on_step)
    return verdict_of(trace, result, oracle, name=name, reference=reference)


def check_steps(
    trace: Trace,
    oracle: Oracle | None = None,
    batches: Sequence[Any] = (),
    on_step: Callable[[int], None] = lambda step: None,
) -> Result:
    """Checks every stage of every recorded step; see `check`."""
    require_steps(trace)
    result = Result()
    for position in range(len(trace.steps)):
        batch = batches[position] if position < len(batches) else None
        check_step(trace, position, oracle, batch, result)
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
    )  # fmt: skip


def _tolerance(result: Result, oracle: Oracle | None) -> str:
    if oracle is None:
        return "those of float32 sums and updates"
    texts = [SPREAD]
    if result.num_in_float64:
        texts = [f"float64 on one device and the difference of float32 from it; {SPREAD}"]
    elif result.num_bitwise:
        texts = [BITWISE]
    why = f" (not float64: {oracle.why_not_exact})" if oracle.why_not_exact else ""
    return f"{texts[0]}{why}"


def check_step(
    trace: Trace, position: int, oracle: Oracle | None, batch: Batch | None, result: Result
) -> None:
    """Checks every stage of one step, and adds what it finds to a result.

    Args:
        trace: the trace to check.
        position: position of the step in the trace, from 0.
        oracle: computes what is right; None to check consistency alone.
        batch: leaves of the global batch as defined by the data set, if known.
        result: gets the findings.
    """
    context = Context(trace, position, oracle, batch, result.checked)
    if context.has("before") and not all(map(are_finite, context.named("before"))):
        text = "the step starts from weights that are NaN or infinite, so it cannot be compared"
        result.findings.append(context.found("not_finite", text, design=True))
        return
    with np.errstate(invalid="ignore", over="ignore"):  # Of trainings that overflow.
        prepare(context)
        for stage, check_stage in CHECKS.items():
            context.stage = stage
            for found in check_stage(context):
                if isinstance(found, Facts):
                    context.facts = found
                else:
                    result.findings.append(found)
    result.measurements += context.measurements
    result.num_bitwise += len(context.facts.exact)
    result.num_in_float64 += context.num_in_float64


def prepare(context: Context) -> None:
    """Compares all shards bitwise with one device, and computes what they share."""
    if not context.computes:
        return
    if context.trace.about.whole_loss and context.has("y_pred") and context.has("mask"):
        _prepare_whole_loss(context)
    if context.oracle.synchronizes:
        _compute_together(context)
    elif context.has("loss") and context.has("raw") and context.has("after"):
        asks = [context.ask(shard, scales=(1.0, 1.0)) for shard in context.shards]
        computed = context.oracle.bitwise(asks, sum(context.sizes))
        if computed is not None:
            exact = {s for s, each in enumerate(computed) if is_bitwise(context, s, each)}
            context.facts = dataclasses.replace(context.facts, exact=frozenset(exact))


def _prepare_whole_loss(context: Context) -> None:
    """Sets where the backward pass of each shard starts: at its part of the whole loss."""
    sizes = context.sizes
    whole = [np.concatenate(parts) for parts in zip(*context.data, strict=True)]
    starts = starts_of(context, whole, context.joined("y_pred"), context.joined("mask"))
    context.base_scales = tuple((1.0, size / sum(sizes)) for size in sizes)
    context.facts = dataclasses.replace(
        context.facts, scales=context.base_scales, starts=tuple(starts)
    )


def _compute_together(context: Context) -> None:
    """Computes the whole batch at once, and splits its predictions by shard."""
    whole = [np.concatenate(parts) for parts in zip(*context.data, strict=True)]
    ask = context.ask(0, data=whole, scales=(1.0, 1.0), starts=None)
    step = context.oracle.compute(ask)
    variables = context.of_kind("weight", "statistic")
    spread = repeated_spread(context.oracle, step, ask, variables, context.position)
    ends = np.cumsum(context.sizes)[:-1]
    per_shard = zip(*(np.split(p, ends) for p in step.y_pred), strict=True)
    for shard, y_pred in enumerate(per_shard):
        expected = Expected(step._replace(y_pred=list(y_pred)), spread, False)
        context.set_expected(shard, expected)
