"""Describes verdicts in sentences for people; `json.py` has them as plain data."""

import re
import shutil
import textwrap
from collections.abc import Mapping, Sequence

from lockstep.answer.names import NAMES, advice_of, code_of, title_of
from lockstep.engine.verdict import (
    BY_DESIGN,
    FAULT,
    NODES,
    NOT_COMPARED,
    NOT_VERIFIED,
    NOTHING,
    Measured,
    Place,
    Verdict,
)

_WIDTH, _LONGEST = 100, 15  # Columns of a text, and of a name of a fact beside it.
_MOST_NAMES, _MOST_LINES = 3, 12  # Names that a text shows; lines of a verdict without details.
_MOST_FORMULAS = 2
NOT_MEASURED = "not measured"  # A node that the claim on the state covers, or that is not recorded.
_OF_ZERO = 1e6  # A larger part of what rounding allows is a difference from 0.
_LEAST_NEEDED = "note", NOT_COMPARED, "meaning"  # Facts that are shortened first.
_TERMS = {  # Pattern of a term of a formula → what it is.
    r"g\d+(?![\d.])": "gN is the gradient that rank N computed",
    r"g\d+\.\d": "gN.M is the gradient that rank N computed of its micro-batch M",
    r"G\b": "G is the reference's gradient",
    r"s\d*\b": "s is the sum of gradients that a rank got",
    r"W\b": "W is the weight",
    r"D\d*\b": "D is the change in this step",
    r"X\b": "X is the value before the step",
    r"loss\d+(?![\d.])": "lossN is the loss of rank N",
    r"loss\d+\.\d": "lossN.M is the loss of rank N for its micro-batch M",
    r"\w+\[t−1\]": "[t−1] is of the step before",
}


def sentence_of(verdict: Verdict) -> str:
    """Returns the verdict in one sentence; of a right training, whether all was compared."""
    name, reference = verdict.training or "the training", verdict.reference or "reference"
    why, seen = "; ".join(verdict.missing), f"{_title(verdict)}{_at(verdict)}"
    if verdict.status == FAULT:
        text = f"{name} is not the {reference}: {seen}"
    elif verdict.status == NOT_VERIFIED:
        text = f"{name} is {NOT_VERIFIED}: {why}"
    elif verdict.status == NOTHING:
        text = f"{name} has {NOTHING}: {why}"
    elif verdict.status == NOT_COMPARED:
        text = f"{name} was {NOT_COMPARED} with the {reference}: {why or seen}, which may be right"
    elif verdict.status == BY_DESIGN:
        text = f"{name} differs from the {reference} by design: {_title(verdict)}; no fault found"
    else:
        part = " where it was compared" if _left_out(verdict) else ""
        size = "bitwise equal" if verdict.is_bitwise else "no difference beyond rounding"
        text = f"{name} is the {reference}{part}: {size}"
    if verdict.ok and (left := _left_out(verdict)):
        text += f"; not compared: {left}"
    return one_line(text)


def _title(verdict: Verdict) -> str:
    return title_of(verdict) + ("" if verdict.name else " difference")


def _at(verdict: Verdict) -> str:
    place = verdict.place
    return f" in {verdict.name_of(place.step)} ({place.node})" if place else ""


def _left_out(verdict: Verdict) -> str:
    """Returns how much was not compared, in a few words."""
    number = verdict.num_unknown
    elements = f"{count('element', number)} of the state, whose gradients are rounding alone"
    parts = [elements] if number else []
    if verdict.notes:
        number = len(verdict.notes)
        parts.append(f"see the {f'{number} notes' if number > 1 else 'note'} below")
    return "; ".join(parts)


def describe(verdicts: Sequence[Verdict], *, details: bool = False) -> str:
    """Returns each verdict: a sentence, where, with which formula, why, what to do, what is left.

    Args:
        verdicts: the verdicts.
        details: whether to add the nodes with the largest differences, all names and the tolerance.
    """
    blocks = list[list[str]]()
    for verdict in verdicts:
        facts = facts_of(verdict, details=details) | _remarks(verdict)
        lines = [sentence_of(verdict), *_shortened(facts, None if details else _MOST_LINES - 1)]
        if details:
            lines += ["", *facts_lines("", _measured(verdict))]
        blocks.append(lines)
    text = ""
    for block, following in zip(blocks, [*blocks[1:], []], strict=True):
        is_long = len(block) > 1 or len(following) > 1
        text += "\n".join(block) + ("\n\n" if is_long and following else "\n")
    return text.rstrip("\n")


def facts_of(verdict: Verdict, *, details: bool = False) -> dict[str, str]:
    """Returns where a training parts from the reference, its formula, why, and what to do.

    The formulas are a line each. There are no facts if it does not part.

    Args:
        verdict: the verdict.
        details: whether to name all tensors and show all formulas.
    """
    if verdict.place is None:
        return {"error": one_line(verdict.error)} if verdict.error else {}
    facts = {"where": _where(verdict.place, verdict, details)}
    facts |= {"formula": _formula(verdict, details), "why": verdict.reason}
    if verdict.name:
        row = NAMES[verdict.name]
        also = f" The fault may also come from {row.also}." if row.also else ""
        facts["meaning"] = row.sentence + also
    label = "to do" if verdict.name else "next"
    facts["to compare" if verdict.status == NOT_COMPARED else label] = advice_of(verdict)
    facts |= code_of(verdict)
    facts["error"] = verdict.error and f"the name was not found out: {verdict.error}"
    return {name: "\n".join(map(one_line, t.split("\n"))) for name, t in facts.items() if t}


def _where(place: Place, verdict: Verdict, details: bool = False) -> str:
    """Returns the step, the node, the tensors, where in them, the ranks and the module."""
    parts = [f"{verdict.name_of(place.step)}, {place.node}: {NODES[place.node]}"]
    return "; ".join([*parts, *_parts_of(place, details)])


def _parts_of(place: Place, details: bool = False) -> list[str]:
    parts = []
    if place.tensors:
        number, total = len(place.tensors), place.num_tensors
        shown = f"{number} of {count('tensor', total)}" if total else count("tensor", number)
        names = ", ".join(place.tensors) if details else first_names(place.tensors)
        parts.append(f"{shown}: {names}")
    if place.where:
        parts.append(place.where if len(place.tensors) < 2 else f"of the first, {place.where}")
    if place.ranks:
        parts.append(first_names(place.ranks))
    return [*parts, *([place.module] if place.module else [])]


def _formula(verdict: Verdict, details: bool) -> str:
    """Returns a line for each formula, and what its terms are; one that is right is left out."""
    is_right = re.compile(r"= (.+); in the reference \1$").search
    lines = [line for line in verdict.formula if not is_right(line)]
    shown = lines if details else lines[:_MOST_FORMULAS]
    more = [f"{len(lines) - len(shown)} more: --details"] if len(lines) > len(shown) else []
    text = "\n".join(shown)
    terms = [what for term, what in _TERMS.items() if re.search(rf"·(\w+\()?{term}", text)]
    return "\n".join([*shown, *more, *([f"({'; '.join(terms)})"] if terms else [])])


def notes_of(verdict: Verdict) -> list[str]:
    """Returns what was not compared, and why; elements of the state are in the sentence."""
    return [one_line(note.removeprefix(f"{NOT_COMPARED}: ")) for note in verdict.notes]


def _remarks(verdict: Verdict) -> dict[str, str]:
    facts = {NOT_COMPARED: "\n".join(notes_of(verdict))}
    facts["note"] = "\n".join(map(one_line, verdict.remarks))
    return {name: text for name, text in facts.items() if text}


def _measured(verdict: Verdict) -> dict[str, str]:
    """Returns node → how far it is from the reference's, and the tolerance."""
    facts = {
        "compared": f"{count('step', len(verdict.steps))} on {count('rank', verdict.num_replicas)}"
    }
    if verdict.measured:  # It is not, if the first step is wrong.
        facts |= {node: measured_text(each) for node, each in nodes_of(verdict).items()}
    return facts | ({"tolerance": one_line(verdict.tolerance)} if verdict.tolerance else {})


def nodes_of(verdict: Verdict) -> dict[str, Measured | None]:
    """Returns node → how far it is from the reference's; None if it was not measured."""
    return dict.fromkeys(NODES) | {each.node: each for each in verdict.measured}


def measured_text(measured: Measured | None) -> str:
    """Returns how far a node is from the reference's."""
    if measured is None:
        return NOT_MEASURED
    share, equal, total = measured.share, measured.num_equal, measured.num_arrays
    if share == 0 and equal == total:
        return "bitwise equal"
    text = f"{share:.2g} of what rounding allows"
    if not share <= 1:
        text = f"{share:.3g} times what rounding allows" if share < _OF_ZERO else "differs"
    return f"{text}; {equal} of {count('array', total)} bitwise equal"


def line_of(verdict: Verdict) -> str:
    """Returns where and how a training parts from the reference, in one line."""
    place = verdict.place
    parts = "".join(f", {part}" for part in _parts_of(place)) if place else ""
    reason = verdict.reason or "; ".join(verdict.missing)
    return one_line(f"{_title(verdict)}{_at(verdict)}{parts}" + (f": {reason}" if reason else ""))


def _shortened(facts: Mapping[str, str], most: int | None) -> list[str]:
    """Returns lines of facts; if there are more than `most`, the least needed end with "…"."""
    blocks = dict(zip(facts, _blocks(facts, _LONGEST), strict=True))
    while most is not None and sum(map(len, blocks.values())) > most:
        long = [name for name in _LEAST_NEEDED if len(blocks.get(name, [])) > 1]
        lines = blocks[long[0]] if long else max(blocks.values(), key=len)
        lines.pop()
        lines[-1] = lines[-1].removesuffix(" …") + " …"
    return [line for block in blocks.values() for line in block]


def facts_lines(title: str, facts: Mapping[str, str], longest: int = _LONGEST) -> list[str]:
    """Returns lines with each fact beside its name, wrapped to the terminal's width.

    Longer names than `longest` have a line of their own.
    """
    lines = [title] if title else []
    return lines + [line for block in _blocks(facts, longest) for line in block]


def _blocks(facts: Mapping[str, str], longest: int) -> list[list[str]]:
    """Returns the lines of each fact."""
    width = min(shutil.get_terminal_size((_WIDTH, 24)).columns, _WIDTH)
    indent = 4 + max((len(name) for name in facts if len(name) <= longest), default=0)
    wrap = textwrap.TextWrapper(
        max(width - indent, 20), break_long_words=False, break_on_hyphens=False
    ).wrap
    blocks = []
    for name, text in facts.items():
        parts = [part for line in text.split("\n") for part in wrap(line)]
        if len(name) > longest:
            parts.insert(0, "")
        lines = [f"{'  ' + name:<{indent}}{part}".rstrip() for part in parts[:1]]
        blocks.append(lines + [" " * indent + part for part in parts[1:]])
    return blocks


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
