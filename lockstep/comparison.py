"""Verifies recordings: each on its own, and all further ones against the first."""

import dataclasses
import functools
import pathlib
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence

from lockstep.arithmetic import EPS, MARGIN
from lockstep.checks.other_examples import (
    compare_examples,
    compare_losses,
    compare_starts,
    repeated_batches,
)
from lockstep.checks.other_gradients import compare_clipping, compare_gradients
from lockstep.checks.other_updates import compare_rules, compare_statistics
from lockstep.context import Context
from lockstep.engine import check_steps, verdict_of
from lockstep.oracles.recording import StepPair, Tolerance, common_steps, match_traces
from lockstep.trace import Trace
from lockstep.verdict import BY_DESIGN, FAULT, Finding, Verdict

DEFAULT_TOLERANCE = 1e-4
# Gradients from inputs of another scale differ by more than this.
_NEAR = 0.1
# A larger effect is a fault that the permuted recording also has, not float32 rounding.
_MOST_BY_ROUNDING = 1e-2
_KERNELS = 64  # ULPs by which correct kernels of two frameworks differ.


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
    if permuted and tolerance is None:
        allowed = computed_tolerance(first, permuted[0], names)
    short = _short_names([first, *others])
    alone = verify_alone(first, short[0], on_step)
    verdicts = {short[0]: dataclasses.replace(alone, tolerance=allowed.text) if others else alone}
    done = len(first.steps)
    for name, other in zip(short[1:], others, strict=True):
        verdicts[name] = verify_against(
            first, other, names, between_frameworks(allowed, first, other), name,
            f"training of {short[0]}", functools.partial(_count, on_step, done),
        )  # fmt: skip
        done += len(other.steps)
    return verdicts


def _count(on_step: Callable[[int], None], done: int, step: int) -> None:
    """Counts a step after those of other recordings."""
    on_step(done + step)


def _short_names(traces: Sequence[Trace]) -> list[str]:
    """Returns file names, with as many parent folders as needed to distinguish them."""
    paths = [pathlib.Path(trace.name or "recording").absolute() for trace in traces]
    for count in range(1, max(len(path.parts) for path in paths) + 1):
        short = [str(pathlib.Path(*path.parts[-count:])) for path in paths]
        if len(set(short)) == len(short):
            return short
    # The same file twice.
    return [f"{path.name} ({number})" for number, path in enumerate(paths, start=1)]


def verify_alone(
    trace: Trace, name: str = "", on_step: Callable[[int], None] = lambda step: None
) -> Verdict:
    """Checks one recording on its own."""
    result = check_steps(trace, on_step=on_step)
    contexts = [Context(trace, position) for position in range(len(trace.steps))]
    repeated = repeated_batches(contexts)
    result.add([
        context.found(
            "not_reshuffled", repeated[context.number], stage="examples", design=True
        )
        for context in contexts
        if context.number in repeated
    ])  # fmt: skip
    return verdict_of(trace, result, None, name=name, reference="")


def verify_against(
    first: Trace,
    second: Trace,
    names: Mapping[str, str],
    tolerance: Tolerance,
    name: str = "",
    reference: str = "",
    on_step: Callable[[int], None] = lambda step: None,
) -> Verdict:
    """Checks a recording, and compares it with the first, step by step.

    Args:
        first: the reference.
        second: the recording to check.
        names: name of a weight in one recording → name in the other, where they do not match.
        tolerance: tolerance of the gradients.
        name, reference: the trainings in words.
        on_step: called after each step, with its number from 1.

    Raises:
        ValueError: the recordings have no step or no weight in common.
    """
    matching = match_traces(first, second, names)
    result = check_steps(second, on_step=on_step)
    sums = [each for each in result.findings if each.stage in ("all-reduce", "clipping")]
    wrong_sums = {step for finding in sums if finding.status == FAULT for step in finding.steps}

    def add(stage: str, findings: Iterable[Finding] | None) -> None:
        if findings is not None:  # Else, it could not be checked.
            result.checked[stage] = None
            result.add([*findings])

    examples = compare_examples(list(common_steps(first, second, matching)))
    skipped: list[str] = []
    for index, pair in enumerate(common_steps(first, second, matching)):
        add("start", compare_starts(pair, is_first=index == 0))
        others = None if examples is None else examples[pair.number]
        if not pair.starts_equally:
            skipped.append(str(pair.number))
        elif others and _is_converted_inside(pair, others[0].cause, tolerance):
            others = []
        add("examples", others)
        gradients = None
        if pair.starts_equally and not others:
            gradients = compare_gradients(pair, tolerance)
            allowed = max(tolerance.usual, _KERNELS * EPS)
            add("gradients", gradients)
            add("loss", _explained_by(gradients, compare_losses(pair, allowed)))
            add("statistics", _explained_by(gradients, compare_statistics(pair, allowed)))
            if pair.number not in wrong_sums and not gradients:
                add("clipping", compare_clipping(pair, tolerance))
        add("update", _without_decay_in_loss(gradients, compare_rules(pair)))
    notes = []
    if skipped:
        notes.append(
            f"gradients of steps {', '.join(skipped)} not compared, which start from other states:"
            " record them with replay="
        )
    unmatched = (*matching.unmatched_first, *matching.unmatched_second)
    if unmatched:
        notes.append(f"not matched: {', '.join(unmatched)}")
    verdict = verdict_of(second, result, None, name=name, reference=reference)
    return dataclasses.replace(verdict, tolerance=tolerance.text, notes=tuple(notes))


def _is_converted_inside(pair: StepPair, cause: str, tolerance: Tolerance) -> bool:
    """Returns whether inputs of another scale or layout give approximately equal gradients.

    One of the models then scales or transposes its inputs, and a remaining difference has another
    cause.
    """
    first, second = pair.gradients
    near = Tolerance(max(tolerance.allowed(list(first)), _NEAR))
    is_form = cause in ("other_normalisation", "other_layout")
    return is_form and bool(first) and not near.wrong(second, first)


def _explained_by(
    gradients: Sequence[Finding] | None, others: list[Finding] | None
) -> list[Finding] | None:
    """Returns findings with the cause of different gradients, if it is known and theirs is not."""
    if not gradients or not others or gradients[0].cause == "unexplained":
        return others
    why = gradients[0]
    return [
        dataclasses.replace(each, status=why.status, cause=why.cause, may_be=why.may_be)
        if each.cause in ("other_loss", "other_statistics")
        else each
        for each in others
    ]


def _without_decay_in_loss(
    gradients: Sequence[Finding] | None, rules: list[Finding] | None
) -> list[Finding] | None:
    """Returns findings on rules, without weight decay that the loss of one script has instead."""
    causes = {finding.cause for finding in gradients or () if finding.status == BY_DESIGN}
    if rules is None or "regularisation_in_the_loss" not in causes:
        return rules
    of_decay = ("other_weight_decay", "weight_decay_placement")
    return [finding for finding in rules if finding.cause not in of_decay]


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
    least = _KERNELS * EPS
    of_weight = {name: max(value, least) for name, value in tolerance.of_weight.items()}
    text = f"{tolerance.text}, and at least {least:.2g} between two frameworks"
    return Tolerance(max(tolerance.usual, least), text, of_weight)


def computed_tolerance(first: Trace, permuted: Trace, names: Mapping[str, str]) -> Tolerance:
    """Computes the tolerance from a recording with permuted examples: another order of sums.

    Raises:
        ValueError: none of its steps starts from a state of the first recording.
    """
    spread: dict[str, float] = {}
    num_steps = 0
    for pair in common_steps(first, permuted, match_traces(first, permuted, names)):
        expected, actual = pair.gradients
        if not expected or not pair.starts_equally:
            continue
        num_steps += 1
        apart = Tolerance(0.0).wrong(actual, expected)
        for name in expected:
            spread[name] = max(spread.get(name, 0.0), apart.get(name, 0.0))
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
    return Tolerance(min(MARGIN * max(usual, EPS), _MOST_BY_ROUNDING), text, of_weight)
