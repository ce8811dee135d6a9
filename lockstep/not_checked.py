"""Says what of two recordings was not compared, and why."""

from collections.abc import Collection, Iterator

from lockstep.answer.text import first_names, named_steps
from lockstep.answer.verdict import NOTHING, Verdict
from lockstep.data.match import Matching
from lockstep.data.trace import Trace
from lockstep.run import Result
from lockstep.stages.examples import (
    has_examples_second,
)
from lockstep.stages.summary import Summary


def incomplete(
    trace: Trace, whose: str = "the training", other: Trace | None = None
) -> Iterator[str]:
    """Yields why a recording does not have the whole training that was asked for.

    Args:
        trace: the recording.
        whose: whose it is.
        other: the one that it is compared with.
    """
    if trace.about.ended_with:
        yield f"{whose} ended with an exception: {trace.about.ended_with}"
    if (missing := _missing(trace)) and not _skips_as(trace, other or trace):
        steps = ", ".join(named_steps([f"step {step}" for step in missing]))
        yield f"{whose} ended before {steps}, which were to be recorded"


def _missing(trace: Trace) -> list[int]:
    return sorted({*trace.about.asked} - {*trace.steps})


def _skips_as(trace: Trace, other: Trace) -> bool:
    """Returns whether a recording lacks steps only as the training skips updates, as another."""
    own = trace.about.trained, trace.about.skipped
    is_equal = own == (other.about.trained, other.about.skipped)
    return is_equal and len(_missing(trace)) <= trace.about.skipped


def skipped(trace: Trace) -> Iterator[str]:
    """Yields how many updates a training has skipped in place of steps that were asked for."""
    if number := trace.about.skipped:
        steps = "an update" if number == 1 else f"{number} updates"
        yield f"the training skips {steps}, as gradients overflow: they are no steps"


def untrained(result: Result) -> list[str]:
    """Returns a note on the weights whose gradients are 0 in every step; none if all are."""
    names = [name for name, is_trained in result.trained.items() if not is_trained]
    if not names or len(names) == len(result.trained):
        return []
    weights = f"{len(names)} of {len(result.trained)} weights, which are 0 in every step"
    return [f"{NOTHING} in the gradients of {weights}: {first_names(names)}"]


def idle_steps(
    first: Trace,
    verdict: Verdict,
    skipped: Collection[int],
    wrong: Collection[int],
    summary: Summary,
    *,
    is_compared: bool,
) -> dict[int, str]:
    """Returns number of a step of which nothing is verified → why.

    Where the gradients of no step were compared, those steps are verified whose weights were.

    Args:
        first: the reference.
        verdict: what was found.
        skipped: numbers of the steps that start from other states.
        wrong: numbers of the steps with a fault.
        summary: what was compared of the weights and state that steps leave.
        is_compared: whether the gradients of some step were compared.
    """
    reasons = dict.fromkeys(
        {*verdict.steps} - {*first.steps}, "the first recording does not have it"
    )
    apart = "the step starts from another state: record it with replay="
    if first.about.sample:
        apart = "a sampled recording is replayed from the state before its first step only"
    reasons |= dict.fromkeys(skipped, apart)
    idle = {s: reasons[s] for s in sorted(reasons) if s not in wrong} | dict(verdict.idle)
    if not (is_compared or verdict.faults):
        text = (
            "gradients of no step could be compared: record them in both scripts, and the second"
            " one with replay="
        )
        unseen = [step for step in verdict.steps if step not in summary.steps]
        idle = {**dict.fromkeys(unseen, text), **idle}
    return idle


def without_gradients(
    verdict: Verdict, idle: Collection[int], *, is_compared: bool
) -> Iterator[str]:
    """Yields that weights and state were compared, and no gradients."""
    if not (is_compared or verdict.faults) and {*verdict.steps} - {*idle}:
        yield (
            "gradients are not compared: they are not recorded in both; weights and state after"
            " each step are, in which a factor that clipping removes does not show"
        )


def to_record(
    verdict: Verdict, skipped: Collection[int], wrong: Collection[int], *, is_compared: bool
) -> Iterator[str]:
    """Yields which gradients are not compared beside a fault, and how to compare them."""
    if {*wrong} & {*skipped} and "not_replayed" not in {f.detail for f in verdict.faults}:
        steps = ", ".join(map(str, sorted({*wrong} & {*skipped})))
        yield f"gradients of steps {steps} are not compared: record them with replay="
    hiding = {finding.stage for finding in verdict.faults} & {"start", "examples", "all-reduce"}
    if hiding and not is_compared and not skipped:
        yield "gradients are not compared: fix the fault above, then record again"


def unknown_weights(matching: Matching, summary: Summary) -> dict[str, list[str]]:
    """Returns why updates were compared in no step → names of these weights, if they are trained.

    A reason has {} in place of the names. Each of the weights may be updated in any way.
    """
    first, second = summary.trained
    found = {
        "this recording has no weight that matches {} of the first one: pass --name_map": [
            name for name in matching.unmatched_first if name in first
        ],
        "the first recording has no weight that matches {}: pass --name_map": [
            name for name in matching.unmatched_second if name in second
        ],
        "no step was compared that updates {}: record the state before and after the same steps,"
        " the second time with replay=": [
            pair.second
            for pair in matching.pairs
            if (pair.first in first or pair.second in second)
            and pair.second not in summary.compared
        ],
    }
    return {why: names for why, names in found.items() if names}


def ended_early(trace: Trace) -> Iterator[str]:
    """Yields which replicas lack steps that others have."""
    for position, number in enumerate(trace.steps):
        if absent := trace.absent(position):
            names = ", ".join(trace.name_of("after", replica) for replica in absent)
            yield f"{names} ended before step {number}: the other replicas are compared"


def not_compared(matching: Matching, second: Trace) -> Iterator[str]:
    """Yields which examples and variables of two recordings are not compared, and why."""
    if has_examples_second(*matching.traces):
        yield (
            "examples are not compared: they are the second axis of the inputs, not the first one;"
            " do not use a recording with permute=, which permutes the first one"
        )
    if unmatched := (*matching.unmatched_first, *matching.unmatched_second):
        yield f"not matched: {', '.join(unmatched)}"
    own = dict.fromkeys(
        x for r in second.copies for x in second.of_replica.get(r, second.about).not_loaded
    )
    if own:
        yield f"not loaded by replay=: {first_names([*own])}"
    for text in dict.fromkeys(x for trace in matching.traces for x in trace.about.left_out):
        yield f"not compared: {text}"
