"""Verifies recordings: each on its own, and the second against the first."""

import dataclasses
import statistics
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from app.records.script_trace import ScriptTrace
from app.runtime.errors import DataError
from app.verification.recordings.one_trace_checks import (
    check_step,
    check_steps_together,
    repeated_batches,
)
from app.verification.recordings.pair_examples import compare_examples
from app.verification.recordings.pair_gradients import compare_clipping, compare_gradients
from app.verification.recordings.pair_loss import compare_losses
from app.verification.recordings.pair_start import compare_starts
from app.verification.recordings.pair_statistics import compare_statistics
from app.verification.recordings.pair_update import compare_rules
from app.verification.recordings.recorded_step import RecordedStep
from app.verification.recordings.step_pair import StepPair
from app.verification.recordings.trace_arrays import EPS, relative_distances
from app.verification.recordings.trace_finding import (
    STAGES,
    TraceFinding,
    explained_by,
    merged,
)
from app.verification.script_match import Matching, match_variables
from lockstep.verdict import BY_DESIGN, CLEAN, FAULT

DEFAULT_TOLERANCE = 1e-4
# One permutation underestimates the largest effect of rounding.
_MARGIN = 8
# Gradients from inputs of another scale differ by more than this.
_NEAR = 0.1
# A larger effect is a fault that the permuted recording also has, not float32 rounding.
_MOST_BY_ROUNDING = 1e-2
_KERNELS = 64  # ULPs by which correct kernels of two frameworks differ.


@dataclasses.dataclass(frozen=True)
class TraceReport:
    """The result of verifying a recording.

    Attributes:
        trace: the recording.
        stages: stage → "clean", "by design" or "fault", for the stages that were checked.
        findings: findings in the order of the stages.
        skipped: numbers of the steps whose gradients were not compared with the first recording,
            because they start from another state.
        unmatched: names of weights without a match in the other recording.
    """

    trace: ScriptTrace
    stages: Mapping[str, str]
    findings: Sequence[TraceFinding]
    skipped: tuple[int, ...] = ()
    unmatched: tuple[str, ...] = ()

    @property
    def faults(self) -> list[TraceFinding]:
        """The findings with status "fault"."""
        return [finding for finding in self.findings if finding.status == FAULT]


@dataclasses.dataclass(frozen=True)
class Tolerance:
    """The relative difference of gradients that rounding can cause.

    Attributes:
        of_weight: name of the weight in the first recording → relative difference.
        usual: relative difference for other weights.
        text: how it was computed.
    """

    of_weight: Mapping[str, float]
    usual: float
    text: str

    def __call__(self, weight: str) -> float:
        """Returns the relative difference that rounding can cause in a weight's gradient."""
        return self.of_weight.get(weight, self.usual)


def between_frameworks(tolerance: Tolerance, first: ScriptTrace, second: ScriptTrace) -> Tolerance:
    """Returns a tolerance of at least the difference of kernels of two frameworks.

    Permuting the examples changes the order of sums over examples; another framework also sums
    pixels and channels in another order.
    """
    if first.framework == second.framework or not tolerance.of_weight:
        return tolerance
    least = _KERNELS * EPS
    return Tolerance(
        {name: max(value, least) for name, value in tolerance.of_weight.items()},
        max(tolerance.usual, least),
        f"{tolerance.text}, and at least {least:.2g} between two frameworks",
    )


class _Stages:
    """Collects findings by stage; a checked stage without findings is clean."""

    def __init__(self) -> None:
        self._found: dict[str, list[TraceFinding]] = {}

    def add(self, stage: str, findings: Iterable[TraceFinding] | None) -> None:
        """Adds the findings of a stage; None if it could not be checked."""
        if findings is not None:
            self._found.setdefault(stage, []).extend(findings)

    def steps_with_faults(self, *names: str) -> set[int]:
        """Returns the numbers of the steps in which any of these stages has a fault."""
        found = (each for name in names for each in self._found.get(name, ()))
        return {step for each in found if each.status == FAULT for step in each.steps}

    def found_in(self, step: int, stage: str) -> list[TraceFinding]:
        """Returns the findings of a stage in a step."""
        return [each for each in self._found.get(stage, ()) if step in each.steps]

    def report(self, trace: ScriptTrace, **more: tuple) -> TraceReport:
        """Returns the report."""
        findings = merged([each for found in self._found.values() for each in found])
        stages = {}
        for stage in STAGES:
            if stage in self._found:
                statuses = [CLEAN, *(each.status for each in findings if each.stage == stage)]
                stages[stage] = max(statuses, key=[CLEAN, BY_DESIGN, FAULT].index)
        return TraceReport(trace, stages, findings, **more)


def verify_alone(trace: ScriptTrace) -> TraceReport:
    """Checks one recording on its own."""
    stages = _Stages()
    _check_alone(trace, stages)
    return stages.report(trace)


def verify_against(
    first: ScriptTrace,
    second: ScriptTrace,
    names: Mapping[str, str],
    tolerance: Tolerance,
) -> TraceReport:
    """Checks a recording, and compares it with the first, step by step.

    Args:
        first: the reference.
        second: the recording to check.
        names: name of a weight in the second recording → name in the first.
        tolerance: tolerance of the gradients.

    Raises:
        DataError: the recordings have no step or no weight in common.
    """
    matching = match_variables(first, second, names)
    pairs = pairs_of(first, second, matching)
    stages = _Stages()
    _check_alone(second, stages, is_compared=True)
    other_sums = stages.steps_with_faults("all-reduce", "clipping")
    examples = compare_examples([(pair.first, pair.second) for pair in pairs])
    skipped = []
    for pair in pairs:
        stages.add("start", compare_starts(pair, is_first=pair is pairs[0]))
        others = examples[pair.number] if examples is not None else None
        if not pair.starts_equally:
            skipped.append(pair.number)
        elif others and _is_converted_inside(pair, others, tolerance):
            others = []
        if pair.starts_equally and not others:
            _compare_computation(pair, stages, tolerance)
            if pair.number not in other_sums and not stages.found_in(pair.number, "gradients"):
                stages.add("clipping", compare_clipping(pair, tolerance))
        stages.add("examples", others)
        stages.add("update", _but_decay_in_loss(compare_rules(pair), stages, pair.number))
        pair.release()
    return stages.report(
        second,
        skipped=tuple(skipped),
        unmatched=(*matching.unmatched_first, *matching.unmatched_second),
    )


def _is_converted_inside(
    pair: StepPair, others: Sequence[TraceFinding], tolerance: Tolerance
) -> bool:
    """Returns whether inputs of another scale or layout give approximately equal gradients.

    One of the models then scales or transposes its inputs, and a remaining difference has another
    cause.
    """
    is_form = others[0].cause in ("other_normalisation", "other_layout")
    return is_form and compare_gradients(pair, lambda name: max(tolerance(name), _NEAR)) == []


def _compare_computation(pair: StepPair, stages: _Stages, tolerance: Tolerance) -> None:
    """Compares the results of two recordings from the same state and examples."""
    gradients = compare_gradients(pair, tolerance)
    losses = compare_losses(pair, max(tolerance.usual, 1e-5))
    statistics = compare_statistics(pair, max(1e-4, tolerance.usual))
    stages.add("loss", explained_by(gradients, losses, "other_loss"))
    stages.add("gradients", gradients)
    stages.add("statistics", explained_by(gradients, statistics, "other_statistics"))


def _but_decay_in_loss(
    rules: list[TraceFinding] | None, stages: _Stages, number: int
) -> list[TraceFinding] | None:
    """Omits a different weight decay that one script has in its loss, with the same value."""
    in_loss = [
        each
        for each in stages.found_in(number, "gradients")
        if (each.cause, each.status) == ("regularisation_in_the_loss", BY_DESIGN)
    ]
    left_out = ("other_weight_decay", "weight_decay_placement") if in_loss else ()
    return rules and [each for each in rules if each.cause not in left_out]


def _check_alone(trace: ScriptTrace, stages: _Stages, *, is_compared: bool = False) -> None:
    steps = [RecordedStep(trace, position) for position in range(len(trace.steps))]
    for step in steps:
        for stage, findings in check_step(step):
            stages.add(stage, findings)
        step.release()
    for finding in check_steps_together(steps):
        stages.add(finding.stage, [finding])
    if not is_compared:
        for earlier, later in repeated_batches(steps):
            text = f"step {later} has the examples of step {earlier} again, in the same order"
            stages.add(
                "examples",
                [TraceFinding("examples", BY_DESIGN, "not_reshuffled", text, (later,))],
            )


def pairs_of(first: ScriptTrace, second: ScriptTrace, matching: Matching) -> list[StepPair]:
    """Returns the steps that two recordings have in common.

    Raises:
        DataError: there is no common step, or no weight matches.
    """
    if not matching.pairs:
        raise DataError(
            f"{second.name}: no weight matches one of {first.name} by name or shape; pass"
            " --name_map"
        )
    common = [number for number in first.steps if number in second.steps]
    if not common:
        raise DataError(
            f"{second.name}: has no step in common with {first.name}; record the same steps"
        )
    return [
        StepPair(
            RecordedStep(first, first.steps.index(number)),
            RecordedStep(second, second.steps.index(number)),
            matching,
        )
        for number in common
    ]


def given_tolerance(value: float | None) -> Tolerance:
    """Returns the tolerance of a flag, or the default."""
    if value is not None:
        return Tolerance({}, value, f"{value:g}, given by --tolerance")
    text = (
        f"{DEFAULT_TOLERANCE:g}, the default; record a third time with permute=1 to compute it from"
        " the effect of rounding"
    )
    return Tolerance({}, DEFAULT_TOLERANCE, text)


def computed_tolerance(
    first: ScriptTrace, permuted: ScriptTrace, names: Mapping[str, str]
) -> Tolerance:
    """Computes the tolerance from a recording with permuted examples: another order of sums.

    Raises:
        DataError: none of its steps starts from a state of the first recording.
    """
    matching = match_variables(first, permuted, names)
    spread: dict[str, float] = {}
    num_steps = 0
    for pair in pairs_of(first, permuted, matching):
        both = pair.gradients() if pair.starts_equally else None
        if both is None:
            continue
        num_steps += 1
        expected, actual = both
        apart = relative_distances([actual[name] for name in expected], list(expected.values()))
        for name, far in zip(expected, apart, strict=True):
            spread[name] = max(spread.get(name, 0.0), far)
        pair.release()
    if not spread:
        raise DataError(
            f"{permuted.name}: no step starts from the state of {first.name}; record it with"
            " replay= and the same steps"
        )
    # If examples are summed in higher precision, permuting them has no effect and is not
    # conclusive.
    usual = statistics.median([far for far in spread.values() if far] or [EPS])
    of_weight = {
        name: min(_MARGIN * max(far, usual, EPS), _MOST_BY_ROUNDING)
        if np.isfinite(far)
        else DEFAULT_TOLERANCE
        for name, far in spread.items()
    }
    low, high = min(of_weight.values()), max(of_weight.values())
    text = (
        f"{low:.2g} to {high:.2g}, relative, {_MARGIN} times the effect of permuting the examples"
        f" in {num_steps} steps of {permuted.name}"
    )
    if high == _MOST_BY_ROUNDING:
        text += ", limited to 0.01: a larger effect is not rounding"
    return Tolerance(of_weight, min(_MARGIN * max(usual, EPS), _MOST_BY_ROUNDING), text)
