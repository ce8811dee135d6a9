"""Describes the contents of `verify.json` for a case or traces in sentences."""

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

CLEAN, BY_DESIGN, FAULT = "clean", "by design", "fault"  # Spelled as in the recorder.
NOT_CHECKED = "–"
EVALUATION = "an evaluation"  # Name of the last "step".

Run = Mapping[str, Any]  # The entry of one strategy in `verify.json`.
Found = Mapping[str, Any]  # One of its findings.


@dataclasses.dataclass(frozen=True)
class Explanation:
    """A finding in words.

    Attributes:
        status: "by design" or "fault".
        title: strategies, status and cause, as in "keras_fit, fault: clipped before the sum".
        facts: "where", "why", "remedy" and, if the finding has a size, "difference" → text.
    """

    status: str
    title: str
    facts: Mapping[str, str]


def verdict(strategy: str, run: Run) -> tuple[str, str]:
    """Returns the status of a strategy or trace, and a sentence with the reason.

    Args:
        strategy: name of the strategy.
        run: its entry in `verify.json`.

    Returns:
        "clean", "by design" or "fault", and the sentence.
    """
    training = run["reference"]
    faults = _causes(run, FAULT)
    by_design = [cause for cause in _causes(run, BY_DESIGN) if cause not in faults]
    if not training:
        return _verdict_alone(strategy, faults, by_design)
    if faults:
        more = f"; also different by design: {', '.join(by_design)}" if by_design else ""
        status, text = FAULT, f"is not the {training}: {', '.join(faults)}{more}"
    elif by_design:
        causes = ", ".join(by_design)
        status, text = BY_DESIGN, f"differs by design from the {training}: {causes}; no fault found"
    else:
        status, text = CLEAN, f"is the {training}: every stage is clean"
    return status, one_line(f"{strategy} {text}")


def _verdict_alone(name: str, faults: list[str], by_design: list[str]) -> tuple[str, str]:
    """Returns the verdict on a single trace."""
    if faults:
        return FAULT, one_line(f"{name} has faults: {', '.join(faults)}")
    more = f"; by design: {', '.join(by_design)}" if by_design else ""
    status = BY_DESIGN if by_design else CLEAN
    return status, one_line(f"{name} has no fault in itself: every check is clean{more}")


def stages_of(runs: Iterable[Run]) -> dict[str, str]:
    """Returns the stages that were checked in any run, in order, with descriptions."""
    runs = list(runs)
    checked = {stage for run in runs for stage in run["stages"]}
    checked |= {found["stage"] for run in runs for found in run["findings"]}
    what = {stage: text for run in runs for stage, text in run["checks"].items()}
    return {one_line(stage): one_line(text) for stage, text in what.items() if stage in checked}


def stage_status(run: Run, stage: str) -> tuple[str, list[str]]:
    """Returns the status of a stage, `NOT_CHECKED` if it was not, and the causes found in it."""
    found = [each for each in run["findings"] if each["stage"] == stage]
    statuses = {each["status"] for each in found} or {run["stages"].get(stage, NOT_CHECKED)}
    status = FAULT if FAULT in statuses else str(next(iter(statuses)))
    return status, list(dict.fromkeys(cause_of(each) for each in found))


def explanations(runs: Mapping[str, Run], most: int = 3) -> list[Explanation]:
    """Explains every finding, faults first; merges equal findings of several strategies.

    Args:
        runs: strategy → its entry in `verify.json`.
        most: number of variables of a finding to name.
    """
    names: dict[tuple, list[str]] = {}
    for name, run in runs.items():
        for found in run["findings"]:
            facts = tuple(_facts(found, run["steps"], most).items())
            names.setdefault((found["status"], cause_of(found), facts), []).append(name)
    explained = [
        Explanation(status, one_line(f"{', '.join(strategies)}, {status}: {cause}"), dict(facts))
        for (status, cause, facts), strategies in names.items()
    ]
    return sorted(explained, key=lambda each: each.status != FAULT)


def cause_of(found: Found) -> str:
    """Returns the cause of a finding in words."""
    return one_line(found["cause"]).replace("_", " ")


def shortened(steps: Sequence[str]) -> list[str]:
    """Returns names of steps, with consecutive "step 1", "step 2", … joined."""
    numbers = [int(step.split()[1]) for step in steps if step.startswith("step ")]
    others = [one_line(step) for step in steps if not step.startswith("step ")]
    if len(numbers) > 2 and numbers == list(range(numbers[0], numbers[-1] + 1)):
        return [f"steps {numbers[0]} to {numbers[-1]}", *others]
    return [*(f"step {number}" for number in numbers), *others]


def one_line(text: object) -> str:
    """Returns text without line breaks and control characters, which a user's names may contain."""
    return "".join(letter if letter.isprintable() else " " for letter in str(text))


def _causes(run: Run, status: str) -> list[str]:
    return list(dict.fromkeys(cause_of(f) for f in run["findings"] if f["status"] == status))


def _facts(found: Found, steps: Sequence[str], most: int) -> dict[str, str]:
    facts = {
        "where": _where(found, steps, most),
        "why": found["text"],
        "remedy": found["remedy"],
    }
    if found["distance"] and math.isfinite(found["distance"]):
        allowed = f"; rounding allows {found['allowed']:.2g}" if found["allowed"] else ""
        facts["difference"] = f"up to {found['distance']:.2g}, relative{allowed}"
    return {name: one_line(text) for name, text in facts.items()}


def _where(found: Found, steps: Sequence[str], most: int) -> str:
    """Returns the stage, the steps, the replicas and the variables of a finding."""
    everywhere = set(found["steps"]) >= {step for step in steps if step != EVALUATION}
    when = "every step" if everywhere else ", ".join(shortened(found["steps"]))
    is_evaluation = set(found["steps"]) == {EVALUATION}  # Its stage says so.
    parts = [found["stage"] if is_evaluation else f"{found['stage']}, {when}"]
    if replicas := [str(int(replica)) for replica in found["replicas"]]:
        parts.append(f"replica{'s' * (len(replicas) > 1)} {', '.join(replicas)}")
    if tensors := list(found["tensors"]):
        more = f" and {len(tensors) - most} more" if len(tensors) > most else ""
        parts.append(", ".join(tensors[:most]) + more)
    return "; ".join(parts)
