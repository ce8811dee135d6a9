"""Describes verdicts: in sentences for people, as plain data for programs."""

import math
from collections.abc import Sequence
from typing import Any

from lockstep.causes import remedy_of, title_of
from lockstep.verdict import BY_DESIGN, FAULT, NOTHING, STAGES, Finding, Verdict

_MOST_NAMES = 3  # Names of variables or layers that a text shows.
_OF_ZERO = 1e6  # A larger relative difference is one from 0.


def sentence_of(verdict: Verdict) -> str:
    """Returns the verdict in one sentence."""
    faults = _causes(verdict, FAULT)
    by_design = ", ".join(c for c in _causes(verdict, BY_DESIGN) if c not in faults)
    name, training = one_line(verdict.name), one_line(verdict.reference)
    if faults:
        what = f"is not the {training}" if training else "has faults"
        more = f"; also different by design: {by_design}" if by_design else ""
        return f"{name} {what}: {', '.join(faults)}{more}"
    if verdict.status == NOTHING:
        return f"{name}: {NOTHING}: {'; '.join(dict.fromkeys(verdict.idle.values()))}"
    if not training:
        more = f"; by design: {by_design}" if by_design else ""
        return f"{name} has no fault in itself: every check is clean{more}"
    if by_design:
        return f"{name} differs by design from the {training}: {by_design}; no fault found"
    bits = ", bit for bit" if verdict.is_bitwise else ""
    return f"{name} is the {training}: every stage is clean{bits}"


def describe(verdict: Verdict) -> str:
    """Returns the verdict with its tolerances, notes, stages and findings, one line each."""
    steps, replicas = count("step", len(verdict.steps)), count("replica", verdict.num_replicas)
    lines = [f"{sentence_of(verdict)} ({steps} on {replicas})"]
    if verdict.tolerance:
        lines.append(f"tolerances: {verdict.tolerance}")
    lines += notes_of(verdict)
    for stage, what in STAGES.items():
        if (status := verdict.status_of(stage)) == "not checked":
            continue
        lines.append(f"  {stage:<15} {status:<10} {what}")
        for finding in verdict.findings:
            if finding.stage == stage:
                lines.append(f"      {finding.status.upper()}: {title_of(finding.cause)}")
                facts = facts_of(finding, verdict)
                lines += [f"      {name:<11} {text}" for name, text in facts.items()]
    return "\n".join(map(one_line, lines))


def notes_of(verdict: Verdict) -> list[str]:
    """Returns what could not be compared or verified, and why."""
    notes, reasons = list(verdict.notes), dict.fromkeys(verdict.idle.values())
    for reason in reasons if verdict.status != NOTHING else ():
        steps = [verdict.name_of(step) for step, why in verdict.idle.items() if why == reason]
        notes.append(f"{NOTHING} in {', '.join(named_steps(steps))}: {reason}")
    return notes


def facts_of(finding: Finding, verdict: Verdict) -> dict[str, str]:
    """Returns where a finding is, why, what to do and, if it has a size, the difference."""
    facts = {
        "where": _where(finding, verdict),
        "why": finding.text,
        "remedy": remedy_of(finding.cause, verdict.framework),
    }
    if difference := _difference(finding):
        facts["difference"] = difference
    return {name: one_line(text) for name, text in facts.items()}


def line_of(finding: Finding, verdict: Verdict) -> str:
    """Returns a finding in one line: cause, place, reason and size."""
    size = f" ({difference})" if (difference := _difference(finding)) else ""
    where = _where(finding, verdict)
    return one_line(f"{title_of(finding.cause)} in {where}: {finding.text}{size}")


def record_of(verdict: Verdict) -> dict[str, Any]:
    """Returns a verdict as plain data, without its measurements; see docs/verify_json.md."""
    stages = {stage: verdict.status_of(stage) for stage in STAGES}
    shown = ("stage", "status", "cause", "text", "module", "items", "tensors")
    return {
        "reference": verdict.reference,
        "framework": verdict.framework,
        "status": verdict.status,
        "sentence": sentence_of(verdict),
        "num_replicas": verdict.num_replicas,
        "steps": [verdict.name_of(step) for step in verdict.steps],
        "stages": {stage: s for stage, s in stages.items() if s != "not checked"},
        "findings": [
            {name: getattr(finding, name) for name in shown}
            | {
                "steps": [verdict.name_of(step) for step in finding.steps],
                "remedy": remedy_of(finding.cause, verdict.framework),
                "distance": finite(finding.distance),
                "allowed": finite(finding.allowed),
            }
            for finding in verdict.findings
        ],
        "tolerance": verdict.tolerance,
        "notes": notes_of(verdict),
    }


def columns_of(verdict: Verdict) -> dict[str, list]:
    """Returns the measurements of a verdict as columns, so that each name is written once.

    Steps are positions in the list of the checked steps.
    """
    position = {step: index for index, step in enumerate(verdict.steps)}
    names = ("stage", "tensor", "item", "distance", "allowed", "same_bits")
    columns: dict[str, list] = {"step": [position[m.step] for m in verdict.measurements]}
    columns |= {name: [getattr(m, name) for m in verdict.measurements] for name in names}
    for name in ("distance", "allowed"):
        columns[name] = [finite(value) for value in columns[name]]
    return columns


def finite(value: float) -> float | None:
    """Returns a number that JSON has; None for NaN and infinity."""
    return value if math.isfinite(value) else None


def named_steps(names: Sequence[str]) -> list[str]:
    """Returns names of steps, with three or more consecutive numbers joined."""
    numbers = [int(name.split()[1]) for name in names if name.startswith("step ")]
    others = [name for name in names if not name.startswith("step ")]
    if len(numbers) > 2 and numbers == list(range(numbers[0], numbers[-1] + 1)):
        return [f"steps {numbers[0]} to {numbers[-1]}", *others]
    return [*(f"step {number}" for number in numbers), *others]


def one_line(text: object) -> str:
    """Returns text without line breaks and control characters, which a user's names may contain."""
    return "".join(letter if letter.isprintable() else " " for letter in str(text))


def first_names(names: Sequence[str]) -> str:
    """Returns the first names in words, and "…" for further ones."""
    further = ["…"] if len(names) > _MOST_NAMES else []
    return ", ".join([*names[:_MOST_NAMES], *further])


def count(noun: str, number: int) -> str:
    """Returns a number with its noun."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _causes(verdict: Verdict, status: str) -> list[str]:
    found = (title_of(each.cause) for each in verdict.findings if each.status == status)
    return list(dict.fromkeys(found))


def _where(finding: Finding, verdict: Verdict) -> str:
    """Returns the stage, the steps, the module, the items and the variables of a finding."""
    names = [verdict.name_of(step) for step in finding.steps]
    trained = [step for step in verdict.steps if verdict.name_of(step) != "an evaluation"]
    parts = [finding.stage]
    if len(trained) > 1 and set(finding.steps) >= set(trained):
        parts[0] += ", every step"
    elif finding.stage != "evaluation" and names:
        parts[0] += f", {', '.join(named_steps(names))}"
    if finding.module:
        parts.append(finding.module)
    numbers = [item.rpartition(" ")[2] for item in finding.items]
    if len(numbers) > 1 and all(item.startswith("replica ") for item in finding.items):
        parts.append(f"replicas {', '.join(numbers)}")
    elif finding.items:
        parts.append(", ".join(finding.items))
    if tensors := finding.tensors:
        rest = len(tensors) - _MOST_NAMES
        more = f" and {rest} more" if rest > 0 else ""
        parts.append(", ".join(tensors[:_MOST_NAMES]) + more)
    return "; ".join(parts)


def _difference(finding: Finding) -> str:
    if not finding.distance or not math.isfinite(finding.distance):
        return ""
    if finding.distance > _OF_ZERO:
        return "not 0, as it should be"
    allowed = f"; rounding allows {finding.allowed:.2g}" if finding.allowed else ""
    return f"up to {finding.distance:.2g}, relative{allowed}"
