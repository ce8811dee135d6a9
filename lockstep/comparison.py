"""Verifies recordings: each on its own, and all further ones against the first."""

import dataclasses
import functools
import itertools
import pathlib
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np

from lockstep.answer.causes import title_of
from lockstep.answer.text import first_names, named_steps
from lockstep.answer.verdict import BY_DESIGN, NOTHING, Finding, Verdict, finding_of
from lockstep.arithmetic import EPS, MARGIN, UNITS
from lockstep.checks.claim import Claim, Summary, between
from lockstep.checks.other_changes import compare_updates
from lockstep.checks.other_clipping import compare_clipping
from lockstep.checks.other_examples import (
    compare_examples,
    compare_losses,
    compare_starts,
    has_examples_second,
    other_examples,
    repeated_batch,
    replaced_start,
)
from lockstep.checks.other_forward import compare_each_example
from lockstep.checks.other_gradients import compare_gradients
from lockstep.checks.other_modules import with_modules
from lockstep.checks.other_updates import compare_statistics
from lockstep.checks.random_numbers import compare_keys
from lockstep.context import Context
from lockstep.engine import Result, check_step, require_steps, verdict_of
from lockstep.match import Matching
from lockstep.reference import KERNELS, StepPair, Tolerance, common_steps, match_traces
from lockstep.trace import STATISTIC, WEIGHT, Trace

DEFAULT_TOLERANCE = 1e-4
# A larger effect is a fault that the permuted recording also has, not float32 rounding.
_MOST_BY_ROUNDING = 1e-2
_UNITS_OF_PARTS = 4  # Of the rounding of parts of activations, before they are added.


@np.errstate(invalid="ignore", over="ignore", divide="ignore")  # Of trainings that overflow.
def compare_traces(
    traces: Sequence[Trace],
    names: Mapping[str, str],
    tolerance: float | None = None,
    on_step: Callable[[int], None] = lambda step: None,
) -> dict[str, Verdict]:
    """Verifies each recording on its own, and all further ones against the first.

    Args:
        traces: the recordings; one with permuted examples only gives the tolerance.
        names: names of weights in one recording → names in the other, where they do not match.
        tolerance: relative difference of gradients to allow; None to compute it.
        on_step: called after each step, with the number of steps that have been checked.

    Returns:
        Name of the recording → verdict, in their order.

    Raises:
        ValueError: the recordings have nothing in common.
    """
    permuted = [trace for trace in traces if trace.about.permuted is not None]
    to_verify = [trace for trace in traces if trace.about.permuted is None]
    if not to_verify:
        raise ValueError(
            f"{permuted[0].name}: is recorded with permute=, which only gives the tolerance; pass"
            " the recording to verify, too"
        )
    if len(permuted) > 1:
        raise ValueError(
            f"{permuted[1].name}: is the second recording with permute=; pass only one"
        )
    first, *others = to_verify
    allowed = given_tolerance(tolerance)
    if tolerance is None:
        allowed = in_dtype_of(first, allowed)
        if permuted:
            is_of_first = permuted[0].about.gradients == first.about.gradients
            allowed = computed_tolerance(first, permuted[0], {} if is_of_first else names)
    numbers = itertools.count(1)

    def count(step: int) -> None:
        on_step(next(numbers))

    short, verdicts = _short_names(to_verify), [verify_alone(first, count)]
    if others:
        verdicts[0] = dataclasses.replace(verdicts[0], tolerance=allowed.text)
    for other in others:
        of_pair = between_frameworks(allowed, first, other)
        of_pair = of_pair if tolerance is not None else on_ranks(first, other, of_pair)
        verdict = verify_against(first, other, names, of_pair, count)
        verdicts.append(dataclasses.replace(verdict, reference=f"training of {short[0]}"))
    return {
        name: dataclasses.replace(verdict, name=name)
        for name, verdict in zip(short, verdicts, strict=True)
    }


def _short_names(traces: Sequence[Trace]) -> list[str]:
    """Returns file names, with as many parent folders as needed to distinguish them."""
    paths = [pathlib.Path(trace.name or "recording").absolute() for trace in traces]
    for count in range(1, max(len(path.parts) for path in paths) + 1):
        short = [str(pathlib.Path(*path.parts[-count:])) for path in paths]
        if len(set(short)) == len(short):
            return short
    # The same file twice.
    return [f"{path.name} ({number})" for number, path in enumerate(paths, start=1)]


def verify_alone(trace: Trace, on_step: Callable[[int], None] = lambda step: None) -> Verdict:
    """Checks one recording on its own."""
    result = Result()
    for context in _checked_steps(trace, result, on_step):
        if text := repeated_batch(context):
            context.stage = "examples"
            context.mark_checked()
            result.findings.append(context.found("not_reshuffled", text, design=True))
    verdict = verdict_of(trace, result, None, name="", reference="")
    whole = tuple(_incomplete(trace))
    notes = *_untrained(result), *_ended_early(trace)
    return dataclasses.replace(verdict, notes=notes, unverified=whole)


def _incomplete(trace: Trace, whose: str = "the training") -> Iterator[str]:
    """Yields why a recording does not have the whole training that was asked for."""
    if trace.about.ended_with:
        yield f"{whose} ended with an exception: {trace.about.ended_with}"
    if missing := sorted({*trace.about.asked} - {*trace.steps}):
        steps = ", ".join(named_steps([f"step {step}" for step in missing]))
        yield f"{whose} ended before {steps}, which were to be recorded"


def _untrained(result: Result) -> list[str]:
    """Returns a note on the weights whose gradients are 0 in every step; none if all are."""
    names = [name for name, is_trained in result.trained.items() if not is_trained]
    if not names or len(names) == len(result.trained):
        return []
    weights = f"{len(names)} of {len(result.trained)} weights, which are 0 in every step"
    return [f"{NOTHING} in the gradients of {weights}: {first_names(names)}"]


def verify_against(
    first: Trace,
    second: Trace,
    names: Mapping[str, str],
    tolerance: Tolerance,
    on_step: Callable[[int], None] = lambda step: None,
) -> Verdict:
    """Checks a recording, and compares it with the first, step by step.

    Args:
        first: the reference.
        second: the recording to check.
        names: name of a weight in one recording → name in the other, where they do not match.
        tolerance: tolerance of the gradients.
        on_step: called after each step, with its number from 1.

    Raises:
        ValueError: the recordings have no step or no weight in common.
    """
    matching = match_traces(first, second, names)
    comparisons: dict[str, Callable[[StepPair], Iterator[Finding]]] = {
        "start": compare_starts,
        "random numbers": compare_keys,
        "examples": functools.partial(compare_examples, other_examples(first, second)),
        "forward": compare_each_example,
        "gradients": compare_gradients,  # Their cause is that of other losses and statistics, too.
        "loss": compare_losses,
        "statistics": compare_statistics,
        "clipping": compare_clipping,
        "update": compare_updates,
    }
    result = Result()
    skipped, is_compared, removed = list[int](), False, list[Finding]()
    summary, last = Summary(), None  # The latter: the claim of the last common step.
    note = ""  # On the first step.
    for step in _checked_steps(second, result, on_step):
        if step.number not in first.steps:
            continue
        reference_step = Context(first, first.steps.index(step.number))
        pair = StepPair(reference_step, step, matching, tolerance)
        note = note or replaced_start(pair)
        for stage, compare in comparisons.items():
            step.stage = stage
            pair.findings += compare(pair)
            if stage == "examples":
                removed += pair.remove_false_factors()
        pair.findings = with_modules(pair)
        num_removed = len(removed)
        last = _with_claim(pair, last, summary, removed)
        is_compared = is_compared or len(removed) > num_removed  # By what the step leaves.
        result.findings += pair.findings
        is_compared = is_compared or bool(pair.gradients[0] and pair.computes_the_same)
        if not pair.starts_equally:
            skipped.append(step.number)
    # Steps that cannot be compared divide in the same place as the others.
    details = {finding.detail for finding in removed}
    stages = {"all-reduce", "agreement"}
    result.findings = [
        f
        for f in result.findings
        if f not in removed
        and not summary.is_owned(f)
        and not (f.stage in stages and f.detail in details and f.steps[0] in skipped)
    ]
    result.findings += not_trained(first, second)
    verdict = verdict_of(second, result, None, name="", reference=first.name)
    wrong = {step for finding in verdict.faults for step in finding.steps}
    apart = "the step starts from another state: record it with replay="
    reasons = dict.fromkeys(
        {*second.steps} - {*first.steps}, "the first recording does not have it"
    )
    reasons |= dict.fromkeys(skipped, apart)
    idle = {s: reasons[s] for s in sorted(reasons) if s not in wrong} | dict(verdict.idle)
    if not (is_compared or verdict.faults):
        text = (
            "gradients of no step could be compared: record them in both scripts, and the second"
            " one with replay="
        )
        idle = {**dict.fromkeys(verdict.steps, text), **idle}
    notes = *_not_compared(matching), *_hidden(first, second, result), *_untrained(result)
    notes += (note,) if note else ()
    notes += (*_ended_early(second),)
    if wrong & {*skipped} and "not_replayed" not in {f.detail for f in verdict.faults}:
        steps = ", ".join(map(str, sorted(wrong & {*skipped})))
        notes += (f"gradients of steps {steps} are not compared: record them with replay=",)
    hiding = {finding.stage for finding in verdict.faults} & {"start", "examples", "all-reduce"}
    if hiding and not is_compared and not skipped:
        notes += ("gradients are not compared: fix the fault above, then record again",)
    unverified = *_incomplete(second), *_incomplete(first, "the first recording's training")
    return dataclasses.replace(
        verdict, tolerance=tolerance.text, notes=notes, idle=idle, unverified=unverified,
        unknown_elements=summary.unknown,
    )  # fmt: skip


def _with_claim(
    pair: StepPair, last: Claim | None, summary: Summary, removed: list[Finding]
) -> Claim:
    """Adds what the claim shows of a step to the pair's findings, and returns the claim.

    Args:
        pair: the step.
        last: the claim of the last common step, if any.
        summary: gets what the claim shows.
        removed: gets the findings of this step that it refutes.
    """
    claim = Claim(pair)
    refuted = claim.confirms([*pair.second.findings, *pair.findings])
    removed += refuted
    pair.findings = [finding for finding in pair.findings if finding not in refuted]
    found = [f for f in (*pair.second.findings, *pair.findings) if f not in refuted]
    pair.findings += claim.unexplained(found)
    if last and last.pair.second.number == pair.second.number - 1:
        earlier = [f for f in last.pair.second.findings if f not in removed]
        pair.findings += between(last, claim, [*earlier, *last.pair.findings, *found])
    summary.add(claim)
    return claim


def _ended_early(trace: Trace) -> Iterator[str]:
    """Yields which replicas lack steps that others have."""
    for position, number in enumerate(trace.steps):
        if absent := trace.absent(position):
            names = ", ".join(trace.name_of("after", replica) for replica in absent)
            yield f"{names} ended before step {number}: the other replicas are compared"


def _not_compared(matching: Matching) -> Iterator[str]:
    """Yields which examples and variables of two recordings are not compared, and why."""
    if has_examples_second(*matching.traces):
        yield (
            "examples are not compared: they are the second axis of the inputs, not the first one;"
            " do not use a recording with permute=, which permutes the first one"
        )
    if unmatched := (*matching.unmatched_first, *matching.unmatched_second):
        yield f"not matched: {', '.join(unmatched)}"


def not_trained(first: Trace, second: Trace) -> Iterator[Finding]:
    """Finds weights of one recording that the other one has, but does not train, in all steps."""
    kinds = {trace: set(trace.kinds.items()) for trace in (first, second)}
    for trace, other, which in ((first, second, "second"), (second, first, "first")):
        names = [
            name
            for name, kind in trace.kinds.items()
            if kind == WEIGHT and (name, STATISTIC) in kinds[other]
        ]
        if names:
            text = f"not trained in the {which} recording: {first_names(names)}"
            yield finding_of("gradients", "frozen", text, second.steps, tensors=names)


def _hidden(first: Trace, second: Trace, result: Result) -> Iterator[str]:
    """Yields what is not checked, as gradients differ by design, and how to check it."""
    causes = {f.cause for f in result.findings if f.stage == "gradients" and f.status == BY_DESIGN}
    if causes := causes & {"local_statistics", "random_layers"}:
        why = " and ".join(map(title_of, sorted(causes)))
        text = f"gradients differ by {why}, by design: a fault that changes them less is not seen"
        if {first.about.framework, second.about.framework} == {"torch"}:
            text += (
                "; record the first script again, in one process, with"
                f' replay="{pathlib.Path(second.name).name}", shards="each"'
            )
        yield text


def _checked_steps(
    trace: Trace, result: Result, on_step: Callable[[int], None]
) -> Iterator[Context]:
    """Checks each step on its own, and yields it."""
    require_steps(trace)
    for position in range(len(trace.steps)):
        yield check_step(trace, position, None, None, result)
        on_step(position + 1)


def given_tolerance(value: float | None) -> Tolerance:
    """Returns the tolerance of a flag, or the default."""
    if value is not None:
        return Tolerance(value, f"{value:g}, given by --tolerance")
    text = (
        f"{DEFAULT_TOLERANCE:g}, the default; record a third time with permute=1 to compute it from"
        " the effect of rounding"
    )
    return Tolerance(DEFAULT_TOLERANCE, text)


def between_frameworks(tolerance: Tolerance, first: Trace, second: Trace) -> Tolerance:
    """Returns a tolerance of at least the difference of kernels of two frameworks.

    Permuting the examples changes the order of sums over examples; another framework also sums
    pixels and channels in another order.
    """
    if first.about.framework == second.about.framework or not tolerance.of_weight:
        return tolerance
    return _at_least(tolerance, KERNELS, "between two frameworks")


def in_dtype_of(trace: Trace, tolerance: Tolerance) -> Tolerance:
    """Returns a tolerance of at least the rounding of the dtype in which a training computes.

    Each matrix product rounds its sum over examples to this dtype, so that another batch size
    changes a gradient by some units, even where permuting the examples changes no bit.
    """
    dtype = trace.about.computed_in
    if dtype not in UNITS:
        return tolerance
    return _at_least(tolerance, min(MARGIN * UNITS[dtype], _MOST_BY_ROUNDING), f"in {dtype}")


def on_ranks(first: Trace, trace: Trace, tolerance: Tolerance) -> Tolerance:
    """Returns a tolerance of at least the rounding of the parts that ranks of a model compute.

    The ranks of tensor or sequence parallelism round each part of an activation and of its gradient
    to the dtype of the layers, before they are added.
    """
    dtype = trace.about.computed_in
    is_same = dtype == first.about.computed_in
    if dtype not in UNITS or not (is_same and trace.model_axes):
        return tolerance
    return _at_least(tolerance, _UNITS_OF_PARTS * UNITS[dtype], f"in {dtype} on ranks of a model")


def _at_least(tolerance: Tolerance, least: float, where: str) -> Tolerance:
    of_weight = {name: max(value, least) for name, value in tolerance.of_weight.items()}
    text = f"{tolerance.text}, and at least {least:.2g} {where}"
    return Tolerance(max(tolerance.usual, least), text, of_weight)


def computed_tolerance(first: Trace, permuted: Trace, names: Mapping[str, str]) -> Tolerance:
    """Computes the tolerance from a recording with permuted examples: another order of sums.

    Raises:
        ValueError: none of its steps starts from a state of the first recording.
    """
    spread: dict[str, float] = {}
    num_steps = 0
    matching = match_traces(first, permuted, names)
    for own, other in common_steps(first, permuted):
        pair = StepPair(own, other, matching, Tolerance(0.0))
        if pair.gradients[0] and pair.starts_equally:
            num_steps += 1
            for name in pair.gradients[0]:
                apart = pair.different_gradients.get(name, 0.0)
                spread[name] = max(spread.get(name, 0.0), apart)
    if not spread:
        raise ValueError(
            f"{permuted.name}: no step starts from the state of {first.name}; record it with"
            " replay= and the same steps"
        )
    # If examples are summed in higher precision, permuting them has no effect and is not
    # conclusive.
    usual = statistics.median([far for far in spread.values() if far] or [EPS])
    of_weight = {
        name: min(MARGIN * max(far, usual, EPS), _MOST_BY_ROUNDING) for name, far in spread.items()
    }
    low, high = min(of_weight.values()), max(of_weight.values())
    text = (
        f"{low:.2g} to {high:.2g}, relative, {MARGIN} times the effect of permuting the examples"
        f" in {num_steps} steps of {permuted.name}"
    )
    if high == _MOST_BY_ROUNDING:
        text += ", limited to 0.01: a larger effect is not rounding"
    usual = min(MARGIN * max(usual, EPS), _MOST_BY_ROUNDING)
    return in_dtype_of(first, Tolerance(usual, text, of_weight))
