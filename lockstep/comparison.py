"""Verifies recordings: each on its own, and all further ones against the first."""

import dataclasses
import functools
import itertools
import pathlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from lockstep.answer.text import first_names
from lockstep.answer.verdict import BY_DESIGN, Finding, Verdict, finding_of
from lockstep.context import Context
from lockstep.data.trace import STATISTIC, WEIGHT, Trace
from lockstep.explain.flat_states import flat_states
from lockstep.explain.pairing import shards_with_right_outputs, widen_bound
from lockstep.explain.random_layers import has_keys
from lockstep.explain.unseen_gradients import unseen_gradients
from lockstep.not_checked import (
    ended_early,
    idle_steps,
    incomplete,
    not_compared,
    skipped,
    to_record,
    unknown_weights,
    untrained,
    without_gradients,
)
from lockstep.numeric.tolerance import (
    Tolerance,
)
from lockstep.reference import StepPair, match_traces, of_pair, tolerance_of
from lockstep.run import CHECKS, OF_GRADIENTS, Result, check_step, require_steps, verdict_of
from lockstep.stages.between import between
from lockstep.stages.claim import Claim
from lockstep.stages.examples import (
    compare_examples,
    other_examples,
    parts_of_a_model,
    repeated_batch,
    with_data_axes,
)
from lockstep.stages.forward import compare_each_example
from lockstep.stages.gradients import FACTORS, compare_gradients, divides_what_it_kept
from lockstep.stages.modules import with_modules
from lockstep.stages.random_numbers import (
    compare_drawn,
    compare_keys,
    compare_repeated,
    compare_replicas,
    draws_as_one,
)
from lockstep.stages.reported_losses import compare_losses
from lockstep.stages.rules import compare_updates
from lockstep.stages.start import compare_starts, replaced_start, resumed_step
from lockstep.stages.statistics import compare_statistics
from lockstep.stages.summary import Summary
from lockstep.stages.update import compare_skipped, skips_overflow
from lockstep.tokens import compare_log_probs, has_log_probs

_OF_SKIPPED = compare_drawn, compare_statistics  # Also compared where a step overflows.
_AFTER_GRADIENTS = *_OF_SKIPPED, compare_updates
_OF_VALUES = "forward", "gradients", "loss"  # Stages that compare what a step computes.


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
    if all(map(has_log_probs, to_verify)) and others:
        return _log_probs(to_verify)
    of_order = permuted[0] if permuted else None
    if of_order and of_order.about.gradients == first.about.gradients:
        allowed = tolerance_of(first, of_order, {}, tolerance)
    else:
        allowed = tolerance_of(first, of_order, names, tolerance)
    numbers = itertools.count(1)

    def count_step(step: int) -> None:
        on_step(next(numbers))

    short, verdicts = _short_names(to_verify), [verify_alone(first, count_step)]
    if others:
        verdicts[0] = dataclasses.replace(verdicts[0], tolerance=allowed.text)
    for other in others:
        verdict = verify_against(first, other, names, of_pair(allowed, first, other), count_step)
        verdicts.append(dataclasses.replace(verdict, reference=f"training of {short[0]}"))
    return {
        name: dataclasses.replace(verdict, name=name)
        for name, verdict in zip(short, verdicts, strict=True)
    }


def _log_probs(traces: Sequence[Trace]) -> dict[str, Verdict]:
    """Returns the verdicts on programs whose log-probabilities of tokens are recorded."""
    first, *others = traces
    short, *names = _short_names(traces)
    return {
        name: dataclasses.replace(
            compare_log_probs(first, other), name=name, reference=f"model of {short}"
        )
        for name, other in zip(names, others, strict=True)
    }


def _short_names(traces: Sequence[Trace]) -> list[str]:
    """Returns file names, with as many parent folders as needed to distinguish them."""
    paths = [pathlib.Path(trace.name or "recording").absolute() for trace in traces]
    for length in range(1, max(len(path.parts) for path in paths) + 1):
        short = [str(pathlib.Path(*path.parts[-length:])) for path in paths]
        if len(set(short)) == len(short):
            return short
    # The same file twice.
    return [f"{path.name} ({number})" for number, path in enumerate(paths, start=1)]


def verify_alone(trace: Trace, on_step: Callable[[int], None] = lambda step: None) -> Verdict:
    """Checks one recording on its own."""
    result = Result()
    for context in _checked_steps(trace, result, on_step):
        if text := repeated_batch(context):
            context.mark_checked("examples")
            found = context.found("examples", "not_reshuffled", text, status=BY_DESIGN)
            result.findings.append(found)
    other_rule = _without_other_rule(trace, result)
    verdict = verdict_of(trace, result, None, name="", reference="")
    whole = tuple(incomplete(trace))
    notes = *untrained(result), *ended_early(trace), *skipped(trace), *other_rule
    return dataclasses.replace(verdict, notes=notes, unverified=whole)


def _without_other_rule(trace: Trace, result: Result) -> list[str]:
    """Removes updates that are not those of the optimizer's class; returns a note on them.

    A script may change them, in a hook of the optimizer: in every step, and on each copy. Whether
    it does so in the other script, too, the comparison tells.
    """
    seen: dict[str, set[tuple[int, str]]] = {}  # Weight → steps and copies; of its state, too.
    found = [f for f in result.findings if (f.stage, f.detail) == ("update", "unexplained")]
    items = [trace.name_of("after", copy) for copy in trace.copies]
    for each in found:
        for name in each.tensors:
            places = itertools.product(each.steps, each.items or items)
            seen.setdefault(trace.variables[name].of or name, set()).update(places)
    num = len(trace.steps) * len(items)
    names = [name for name, places in seen.items() if len(places) == num > len(items)]
    if not names:
        return []
    known = {key for key, variable in trace.variables.items() if {key, variable.of} & {*names}}
    result.findings = [f for f in result.findings if f not in found or not {*f.tensors} <= known]
    kind = trace.about.optimizer.get("class", "the optimizer")
    return [
        f"not compared without a reference: updates that are not those of {kind}, in every step:"
        f" {first_names(names)}"
    ]


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
    second = with_data_axes(first, second)
    matching = match_traces(first, second, names)
    result, compared = Result(), _Compared(other_examples(first, second))
    require_steps(second)
    if number := resumed_step(first, second, matching, tolerance):
        why = (
            f"it starts from the weights before step {number} of the first recording: record a job"
            f" that resumes there with first_step={number}"
        )
        verdict = verdict_of(second, result, None, name="", reference=first.name)
        return dataclasses.replace(verdict, tolerance=tolerance.text, unverified=(why,))
    for position, number in enumerate(second.steps):
        if number in first.steps:
            reference = Context(first, first.steps.index(number))
            pair = StepPair(reference, Context(second, position), matching, tolerance)
            compared.check(pair, result)
        else:
            check_step(second, position, None, None, result)
        on_step(position + 1)
    result.findings = [f for f in result.findings if not compared.is_refuted(f)]
    result.findings += not_trained(first, second)
    verdict = verdict_of(second, result, None, name="", reference=first.name)
    wrong = {step for finding in verdict.faults for step in finding.steps}
    steps, is_compared = compared.skipped, compared.is_compared
    summary = compared.summary
    idle = idle_steps(first, verdict, steps, wrong, summary, is_compared=is_compared)
    notes = *not_compared(matching, second), *untrained(result), *compared.notes
    notes += (*ended_early(second), *skipped(second))
    notes += tuple(without_gradients(verdict, idle, is_compared=is_compared))
    notes += tuple(to_record(verdict, steps, wrong, is_compared=is_compared))
    unverified = [
        *incomplete(second, other=first),
        *incomplete(first, "the first recording's training", second),
    ]
    if compared.parts_of_a_model and not verdict.faults:
        unverified.append(compared.parts_of_a_model)
    unknown = {}
    if not verdict.faults and {*second.steps} - {*idle}:
        unknown = unknown_weights(matching, summary)
        unverified += [why.format(first_names(names)) for why, names in unknown.items()]
    return dataclasses.replace(
        verdict, tolerance=tolerance.text, notes=notes, idle=idle, unverified=tuple(unverified),
        unknown_elements=summary.unknown,
        unknown_weights=tuple(itertools.chain.from_iterable(unknown.values())),
    )  # fmt: skip


class _Compared:
    """Compares steps of two recordings, one after the other, and keeps what all of them show.

    Args:
        examples: what is known of the examples of all steps; see `other_examples`.

    Attributes:
        skipped: numbers of the steps that start from other states.
        is_compared: whether the gradients of some step were compared.
        removed: findings that what a step leaves refutes.
        divides_later: whether the script divides gradients after it has kept what it sends.
        summary: what the claims have shown.
        draws_as_one: whether the replicas draw equal numbers, and use each its part, rightly.
        parts_of_a_model: why it is unknown whether shards are replicas; "" if they are.
        note: on the state that the first step replaced; "" without one.
    """

    def __init__(self, examples: Any) -> None:
        self._comparisons: dict[str, Callable[[StepPair], Iterator[Finding]]] = {
            "start": compare_starts,
            "random numbers": compare_keys,
            "examples": functools.partial(compare_examples, examples),
            "forward": compare_each_example,
            "gradients": _gradients_or_alone,  # Their cause is that of other losses, too.
            "loss": compare_losses,
        }
        self.skipped, self.is_compared, self.removed = list[int](), False, list[Finding]()
        self.divides_later, self.summary, self.note = False, Summary(), ""
        self.draws_as_one, self.parts_of_a_model = False, ""
        self._last: Claim | None = None  # The claim of the last common step.

    @property
    def notes(self) -> Iterator[str]:
        """What was not compared, as the recordings do not have it."""
        if self.note:
            yield self.note
        if names := sorted(self.summary.local):
            yield (
                f"not compared: {first_names(names)} on replicas other than 0, of which the first"
                " recording, shard by shard, has no statistics"
            )

    def check(self, pair: StepPair, result: Result) -> None:
        """Checks a step of the second recording, and compares it; the result gets the findings."""
        step = pair.second
        gradients = functools.partial(self._until_update, pair)
        check_step(step.trace, step.position, None, None, result, gradients=gradients, context=step)
        self._add(pair)
        result.findings += pair.findings

    def _until_update(self, pair: StepPair, step: Context) -> Iterator[Finding]:
        """Compares a step up to its gradients; the pair gets the findings."""
        step.compared = pair.findings
        is_updated = False
        if skips_overflow(pair.first):
            self.removed += [f for f in step.findings if f.detail == "not_finite"]
            pair.findings += compare_skipped(pair)
            is_updated = bool(pair.findings)  # What overflows tells nothing more of it.
        for stage, compare in self._comparisons.items():
            if is_updated and stage in _OF_VALUES:
                continue
            if stage == "forward":
                widen_bound(pair)
            pair.findings += compare(pair)
        yield from ()

    def _add(self, pair: StepPair) -> None:
        """Compares what follows the gradients of a step; the pair gets the findings."""
        self.note = self.note or replaced_start(pair)
        is_updated = any(f.detail == "overflow_not_skipped" for f in pair.findings)
        for compare in _AFTER_GRADIENTS:
            pair.findings += compare(pair) if compare in _OF_SKIPPED or not is_updated else ()
        self.divides_later |= pair.is_comparable and divides_what_it_kept(pair)
        self._compare_random_numbers(pair)
        pair.findings = with_modules(pair)
        num_removed = len(self.removed)
        self._judge_examples(pair)
        self._last = _with_claim(pair, self._last, self.summary, self.removed)
        is_refuting = len(self.removed) > num_removed  # By what the step leaves.
        self.is_compared |= is_refuting or pair.is_comparable
        if not pair.starts_equally:
            self.skipped.append(pair.second.number)

    def _compare_random_numbers(self, pair: StepPair) -> None:
        """Judges equal random states of replicas, once a step has shown that they are right."""
        self.draws_as_one |= draws_as_one(pair)
        pair.findings += compare_repeated(pair)
        found = [f for f in pair.second.findings if f.detail == "same_random_numbers"]
        if self.draws_as_one:
            self.removed += found
            pair.findings += compare_replicas(pair)
        elif found and has_keys(pair):  # A step may fold in the number of the device.
            shards = shards_with_right_outputs(pair) - {0}
            right = {pair.second.trace.name_of("random", shard) for shard in shards}
            self.removed += [f for f in found if right & {*f.items}]

    def _judge_examples(self, pair: StepPair) -> None:
        """Removes equal examples of ranks that may compute parts of one model, rightly."""
        known = [*pair.second.findings, *pair.findings]
        found = [finding for finding in known if finding.stage == "examples"]
        text = parts_of_a_model(pair.second, found)
        if text and Claim(pair, of_any_examples=True).is_right:
            self.parts_of_a_model = text
            self.removed += found
            pair.findings = [finding for finding in pair.findings if finding not in found]

    def is_refuted(self, finding: Finding) -> bool:
        """Returns whether other steps, or what a step leaves, refute a finding."""
        if finding in self.removed or self.summary.is_owned(finding):
            return True
        if (finding.stage, finding.status) == ("statistics", BY_DESIGN):
            # A recording alone says that statistics are local; only the reference computes them.
            return finding.detail == "local_statistics"
        # Steps that cannot be compared divide in the same place as the others.
        details = FACTORS if self.divides_later else {each.detail for each in self.removed}
        is_like_removed = finding.stage in ("all-reduce", "agreement") and finding.detail in details
        return is_like_removed and finding.steps[0] in self.skipped


def _gradients_or_alone(pair: StepPair) -> Iterator[Finding]:
    """Compares gradients, or checks those of a step alone that the reference cannot judge."""
    step = pair.second
    if pair.is_comparable:
        yield from compare_gradients(pair)
        return
    for stage in OF_GRADIENTS:
        yield from CHECKS[stage](step)  # type: ignore[misc]


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
    known = [*pair.second.findings, *pair.findings]
    refuted = claim.confirms(known)
    if last and last.pair.second.number == pair.second.number - 1:
        refuted += [each for each in known if last.confirms_start(each)]
    removed += refuted
    pair.findings = [finding for finding in pair.findings if finding not in refuted]
    found = [f for f in (*pair.second.findings, *pair.findings) if f not in refuted]
    if claim.differing:
        explained = [*flat_states(pair), *unseen_gradients(pair)]
        if explained:  # What the script sums where it is not recorded.
            removed += [each for each in found if each.detail == "not_all_reduced"]
            found = [each for each in found if each not in removed]
            pair.findings = [each for each in pair.findings if each not in removed]
        for stage, cause, text, names in explained:
            found.append(pair.second.found(stage, cause, text, tensors=names))
            pair.findings.append(found[-1])
    pair.findings += claim.unexplained(found)
    if last and last.pair.second.number == pair.second.number - 1:
        earlier = [f for f in last.pair.second.findings if f not in removed]
        pair.findings += between(last, claim, [*earlier, *last.pair.findings, *found])
    summary.add(claim)
    return claim


def not_trained(first: Trace, second: Trace) -> Iterator[Finding]:
    """Finds weights of one recording that the other one has, but does not train, in all steps."""
    kinds = {trace: set(trace.kinds.items()) for trace in (first, second)}
    for trace, other, which, detail in (
        (first, second, "second", "frozen"), (second, first, "first", "not_frozen"),
    ):  # fmt: skip
        names = [
            name
            for name, kind in trace.kinds.items()
            if kind == WEIGHT and (name, STATISTIC) in kinds[other]
        ]
        if names:
            text = f"not trained in the {which} recording: {first_names(names)}"
            yield finding_of("gradients", detail, text, second.steps, tensors=names)


def _checked_steps(
    trace: Trace, result: Result, on_step: Callable[[int], None]
) -> Iterator[Context]:
    """Checks each step on its own, and yields it."""
    require_steps(trace)
    for position in range(len(trace.steps)):
        yield check_step(trace, position, None, None, result)
        on_step(position + 1)
