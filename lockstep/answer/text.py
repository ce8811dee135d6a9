"""Describes verdicts in sentences for people; `json.py` has them as plain data."""

import dataclasses
import math
import shutil
import textwrap
from collections.abc import Iterable, Mapping, Sequence

from lockstep.answer.causes import code_of, comparison_of, remedy_of, words_of
from lockstep.answer.verdict import (
    BY_DESIGN,
    FAULT,
    NOT_COMPARED,
    NOT_VERIFIED,
    NOTHING,
    STAGES,
    Finding,
    Measurement,
    Verdict,
)

# Stage → what is compared, in a few words; `STAGES` has a sentence.
CLAUSES = {
    "start": "replicas begin with equal weights",
    "random numbers": "none is drawn twice",
    "examples": "each is on one replica",
    "forward": "predictions",
    "loss": "that of each shard",
    "regularisation": "losses of the weights",
    "gradients": "those of each replica",
    "clipping": "the clipped sum",
    "all-reduce": "sum of the gradients",
    "update": "new weights",
    "statistics": "BatchNorm averages, seeds",
    "agreement": "replicas end with equal weights",
    "evaluation": "each test example counts once",
    "time": "no replica is late",
}
_WIDTH, _LONGEST = 100, 15  # Columns of a text, and of a name of a fact beside it.
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
    if verdict.status == NOT_VERIFIED:
        return f"{name}: {NOT_VERIFIED}: {'; '.join(verdict.unverified)}"
    if missing := _causes(verdict, NOT_COMPARED):
        what = f" with the {training}" if training else ""
        return f"{name}: {NOT_COMPARED}{what}: {', '.join(missing)}; no fault in what was compared"
    if verdict.status == NOTHING:
        return f"{name}: {NOTHING}: {'; '.join(dict.fromkeys(verdict.idle.values()))}"
    if not training:
        more = f"; by design: {by_design}" if by_design else ""
        return f"{name} has no fault in itself: every check is clean{more}"
    rest = [verdict.name_of(step) for step in verdict.steps if step not in verdict.idle]
    some = f" in {', '.join(named_steps(rest))}" if verdict.idle else ""
    if by_design:
        return f"{name} differs by design from the {training}{some}: {by_design}; no fault found"
    bits = ", bit for bit" if verdict.is_bitwise else ""
    return f"{name} is the {training}{some}: every checked stage is clean{bits}"


def describe(verdicts: Sequence[Verdict], *, details: bool = False, most: int | None = None) -> str:
    """Returns the verdicts in a sentence each, then what was not verified, then the findings.

    Args:
        verdicts: the verdicts, of different names.
        details: whether to add the stages, with the largest differences, and the tolerances.
        most: number of findings to explain; None for all.
    """
    lines = [one_line(sentence_of(verdict)) for verdict in verdicts]
    lines += [one_line(f"{each.name}: {note}") for each in verdicts for note in notes_of(each)]
    explained = explanations(verdicts, all_names=details)
    for title, facts in explained[:most]:
        if not details:
            facts.pop("difference", "")
        lines += ["", *facts_lines(title, facts)]
    if most is not None and len(explained) > most:
        lines += ["", f"{count('finding', len(explained) - most)} more"]
    for verdict in verdicts if details else ():
        steps, replicas = count("step", len(verdict.steps)), count("replica", verdict.num_replicas)
        title = one_line(f"{verdict.name}: {steps} on {replicas}")
        lines += ["", *facts_lines(title, _stages(verdict))]
    return "\n".join(lines)


def explanations(
    verdicts: Iterable[Verdict], *, all_names: bool = False
) -> list[tuple[str, dict[str, str]]]:
    """Returns a title and facts for each detail, faults first; for equal ones of trainings once.

    Args:
        verdicts: the verdicts.
        all_names: whether to name all variables, not only the first ones.
    """
    names: dict[tuple, list[str]] = {}
    for verdict in verdicts:
        of_details: dict[tuple[str, str], list[Finding]] = {}
        for finding in verdict.findings:
            of_details.setdefault((finding.status, finding.detail), []).append(finding)
        for (status, detail), (first, *others) in of_details.items():
            facts = facts_of(first, verdict)
            if all_names and len(first.tensors) > _MOST_NAMES:
                facts["variables"] = one_line(", ".join(first.tensors))
            for other in others:
                if other.module == first.module:
                    other = dataclasses.replace(other, module="")
                where = _where(other, verdict).removeprefix(f"{other.stage}, ")
                why = f": {other.text}" if other.text != first.text else ""
                facts[f"also {other.stage}"] = one_line(where + why)
            names.setdefault((status, detail, tuple(facts.items())), []).append(verdict.name)
    return [
        (one_line(f"{', '.join(same)}, {status}: {words_of(detail)}"), dict(facts))
        for (status, detail, facts), same in sorted(names.items(), key=lambda n: n[0][0] != FAULT)
    ]


def facts_lines(title: str, facts: Mapping[str, str], longest: int = _LONGEST) -> list[str]:
    """Returns lines with each fact beside its name, wrapped to the terminal's width.

    Longer names than `longest` have a line of their own.
    """
    width = min(shutil.get_terminal_size((_WIDTH, 24)).columns, _WIDTH)
    lines = [title] if title else []
    indent = 4 + max((len(name) for name in facts if len(name) <= longest), default=0)
    wrap = textwrap.TextWrapper(
        max(width - indent, 20), break_long_words=False, break_on_hyphens=False
    ).wrap
    for name, text in facts.items():
        label, parts = f"  {name}", wrap(text)
        if len(name) > longest:
            parts.insert(0, "")
        lines += [f"{label:<{indent}}{part}".rstrip() for part in parts[:1]]
        lines += [" " * indent + part for part in parts[1:]]
    return lines


def _stages(verdict: Verdict) -> dict[str, str]:
    """Returns the status of each stage with its largest difference, and the tolerances."""
    largest, facts = largest_of(verdict.measurements), dict[str, str]()
    for stage, what in STAGES.items():
        facts[stage] = f"{verdict.status_of(stage)}: {what}"
        if stage in largest:
            worst, num_equal, number = largest[stage]
            allowed = f", rounding allows {worst.allowed:.2g}" if worst.allowed else ""
            facts[stage] += f"; differs by {worst.distance:.2g}{allowed}"
            facts[stage] += f"; {num_equal} of {number} bitwise equal" if num_equal else ""
    return facts | ({"tolerances": one_line(verdict.tolerance)} if verdict.tolerance else {})


def largest_of(measured: Sequence[Measurement]) -> dict[str, tuple[Measurement, int, int]]:
    """Returns stage → the array closest to its tolerance, numbers of bitwise equal and all ones."""
    found = {}
    for stage in STAGES:
        if arrays := [each for each in measured if each.stage == stage]:
            wrong = [each for each in arrays if not each.is_within]
            worst = max(wrong or arrays, key=lambda m: (0.0 if wrong else share_of(m), m.distance))
            found[stage] = worst, sum(each.same_bits for each in arrays), len(arrays)
    return found


def share_of(measured: Measurement) -> float:
    """Returns a difference over what is allowed; infinite if none is allowed."""
    if measured.same_bits or measured.distance == 0:
        return 0.0
    share = measured.distance / measured.allowed if measured.allowed else math.inf
    return math.inf if math.isnan(share) else share


def notes_of(verdict: Verdict) -> list[str]:
    """Returns what could not be compared or verified, and why."""
    notes, reasons = list(verdict.notes), dict.fromkeys(verdict.idle.values())
    for reason in reasons if verdict.status != NOTHING else ():
        steps = [verdict.name_of(step) for step, why in verdict.idle.items() if why == reason]
        notes.append(f"{NOTHING} in {', '.join(named_steps(steps))}: {reason}")
    if verdict.status != NOT_VERIFIED:
        notes += [f"{NOT_VERIFIED}: {reason}" for reason in verdict.unverified]
    if verdict.unknown_elements:
        number = count("element", verdict.unknown_elements)
        notes.append(f"{NOT_COMPARED}: {number} of the state, whose gradients are rounding alone")
    return notes


def facts_of(finding: Finding, verdict: Verdict) -> dict[str, str]:
    """Returns where a finding is, why, what to do and, if it has a size, the difference."""
    facts = {"where": _where(finding, verdict), "why": finding.text}
    if finding.status == NOT_COMPARED:
        facts["to compare"] = advice_of(finding, verdict)
    else:
        facts["remedy"] = advice_of(finding, verdict)
        facts |= code_of(finding.detail, verdict.framework, finding.seen)
    if difference := _difference(finding):
        facts["difference"] = difference
    return {name: one_line(text) for name, text in facts.items()}


def advice_of(finding: Finding, verdict: Verdict) -> str:
    """Returns what to do about a difference, or how to compare what was not."""
    if finding.status == NOT_COMPARED:
        return comparison_of(finding.detail, verdict.framework, verdict.name)
    where = finding.seen, finding.stage, finding.module
    return remedy_of(finding.detail, verdict.framework, *where)


def line_of(finding: Finding, verdict: Verdict) -> str:
    """Returns a finding in one line: cause, place, reason and size."""
    size = f" ({difference})" if (difference := _difference(finding)) else ""
    where = _where(finding, verdict)
    return one_line(f"{words_of(finding.detail)} in {where}: {finding.text}{size}")


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
    """Returns the first names in words, and how many more there are."""
    further = len(names) - _MOST_NAMES
    return ", ".join(names[:_MOST_NAMES]) + (f" and {further} more" if further > 0 else "")


def count(noun: str, number: int) -> str:
    """Returns a number with its noun."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _causes(verdict: Verdict, status: str) -> list[str]:
    """Returns the causes of a status in words; a module is named once."""
    found, modules = dict[str, str](), set[str]()
    for each in verdict.findings:
        if each.status == status and each.detail not in found:
            is_new = each.module and each.module not in modules
            found[each.detail] = words_of(each.detail) + (f" ({each.module})" if is_new else "")
            modules.add(each.module)
    return list(found.values())


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
        parts.append(first_names(finding.items))
    if finding.tensors:
        parts.append(first_names(finding.tensors))
    return "; ".join(parts)


def _difference(finding: Finding) -> str:
    if not finding.distance or not math.isfinite(finding.distance):
        return ""
    if finding.distance > _OF_ZERO:
        return "not 0, as it should be"
    allowed = f"; rounding allows {finding.allowed:.2g}" if finding.allowed else ""
    return f"up to {finding.distance:.2g}, relative{allowed}"
