"""Counts what tools say of right and of wrong programs: `python -m cases.table`."""

import collections
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from .heads import FOLDER, RIGHT, Case, read_cases, read_lines

ALL = "all"
LIMITS = {"loss": 1e-3, "weights": 1e-4}  # Relative differences above which one looks again.
TOOLS = ("loss", "weights", "lockstep")
ALARMS = """\
| Right forms: false alarms | forms | `loss` | `weights` | `lockstep` |
| --- | --- | --- | --- | --- |"""
CAUGHT = """\
| Wrong forms: caught | forms | `loss` | `weights` | `lockstep` | right place | right name |
| --- | --- | --- | --- | --- | --- | --- |"""
TRUTH = """\
| | right forms | with the reference's weights | wrong forms | with other weights or state \
| did not run | not finite |
| --- | --- | --- | --- | --- | --- | --- |"""
ROUNDS = """\
| First contact | right: clean | accused | refused | not compared | wrong: named | caught | passed \
| refused | not compared | right place |
| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |"""


def accepted_names() -> dict[str, list[str]]:
    """Returns "case.mistake" → the names by which `lockstep` may call it, of `names.toml`."""
    return tomllib.loads((FOLDER / "names.toml").read_text("utf-8"))


def score(
    cases: Sequence[Case], verdicts: Mapping[str, Any], distances: Mapping[str, Any]
) -> list[str]:
    """Returns the lines of two tables in Markdown: for each kind, what each tool says.

    A false alarm is a right program that a tool calls wrong. Of wrong programs, the right place is
    the node and step of the head, the right name one that `names.toml` accepts.

    Args:
        cases: all cases.
        verdicts: "case.form" → what `lockstep` says.
        distances: "case.form" → how far final weights and losses are from those of the reference.
    """
    names = accepted_names()
    counts: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    for case in cases:
        for form in case.variants:
            key, is_wrong = f"{case.id}.{form}", form in case.wrong
            if key not in verdicts and key not in distances:
                continue
            place = case.wrong[form]["place"] if is_wrong else {}
            said = ["", *_said_by_plain(distances.get(key))]
            said += _said_by_lockstep(verdicts.get(key), place, names.get(key, []))
            for kind in (case.kind, ALL):
                counts[kind].update(f"{'wrong' if is_wrong else 'right'} {each}" for each in said)
    lines = []
    for title, which, columns in (
        (ALARMS, "right", TOOLS), (CAUGHT, "wrong", (*TOOLS, "place", "name")),
    ):  # fmt: skip
        lines += [*title.splitlines()]
        for kind, count in sorted(counts.items(), key=lambda item: (item[0] == ALL, item[0])):
            cells = [_cell(count, which, column) for column in columns]
            lines.append(f"| {kind} | {count[f'{which} ']} | {' | '.join(cells)} |")
        lines.append("")
    return lines[:-1]


def _cell(count: Mapping[str, int], which: str, column: str) -> str:
    """Returns how often a tool says so of right or wrong forms; "–" if it has no results."""
    tool = column if column in TOOLS else "lockstep"
    if not count[f"{which} {tool} ran"]:
        return "–"
    number, unknown = count[f"{which} {column}"], count[f"{which} {column} not compared"]
    share = f" ({100 * number / count[f'{which} ']:.0f} %)" if which == "wrong" else ""
    return f"{number}{share}" + (f", {unknown} not compared" if unknown else "")


def _said_by_plain(line: Mapping[str, Any] | None) -> Iterator[str]:
    for tool, limit in LIMITS.items() if line is not None else ():
        yield f"{tool} ran"
        if line.get(tool) is None:
            yield f"{tool} not compared"
        elif line[tool] > limit:
            yield tool


def _said_by_lockstep(
    line: Mapping[str, Any] | None, place: Mapping[str, Any], names: Sequence[str]
) -> Iterator[str]:
    if line is None:
        return
    yield "lockstep ran"
    if line["status"] == "fault":
        yield "lockstep"
        if place and (line["node"], line["step"]) == (place["node"], place["step"]):
            yield "place"
        if line["name"] in names:
            yield "name"
    elif line["status"] not in ("clean", "by design"):
        yield "lockstep not compared"


def ground_truth(cases: Sequence[Case], distances: Mapping[str, Any]) -> list[str]:
    """Returns the lines of a table of `truth.jsonl`: what final weights and state show.

    A right form is shown if it has the weights of its reference within 1e-4; a wrong one if its
    weights or its other state are ten times as far from the reference's as the right program's.
    """
    counts = collections.Counter[tuple[str, str]]()
    for case in cases:
        twin = distances.get(f"{case.id}.{RIGHT}", {})
        for form in case.variants:
            line = distances.get(f"{case.id}.{form}", {})
            if form in case.right:
                is_shown = line.get("weights") is not None and line["weights"] <= LIMITS["weights"]
            else:
                is_shown = any(
                    (line.get(what) or 0) > max(10 * (twin.get(what) or 0), 1e-6)
                    for what in ("weights", "state")
                )
            kind = "right" if form in case.right else "wrong"
            for name in (case.kind, ALL):
                counts[name, kind] += 1
                counts[name, f"{kind} shown"] += is_shown
                counts[name, "no run"] += not line
                counts[name, "not finite"] += not line.get("finite", True)
    lines = TRUTH.splitlines()
    for kind in [*sorted({case.kind for case in cases}), ALL]:
        columns = "right", "right shown", "wrong", "wrong shown", "no run", "not finite"
        lines.append(f"| {kind} | {' | '.join(str(counts[kind, each]) for each in columns)} |")
    return lines


def agreement(cases: Sequence[Case]) -> list[str]:
    """Returns a line that says how many places of a second reading are those of the heads."""
    heads = {f"{case.id}.{name}": form for case in cases for name, form in case.wrong.items()}
    second = read_lines(FOLDER / "second_reading.jsonl")
    equal = {
        part: sum(line["place"][part] == heads[key]["place"][part] for key, line in second.items())
        for part in ("node", "step", "ranks", "tensors")
    }
    counts = ", ".join(f"{part} {number}" for part, number in equal.items())
    return [f"Of {len(second)} places that were read twice, these parts are equal: {counts}."]


def first_contacts() -> list[str]:
    """Returns the lines of a table of `rounds.toml`, with the sum of all rounds."""
    rounds = tomllib.loads((FOLDER / "rounds.toml").read_text("utf-8"))["round"]
    rows = [
        (f"{number}, {each['date']}", each["right"], each["wrong"], each.get("right_places", "–"))
        for number, each in enumerate(rounds, 1)
    ]
    right, wrong = collections.Counter[str](), collections.Counter[str]()
    for each in rounds:
        right.update(each["right"])
        wrong.update(each["wrong"])
    lines = [ROUNDS]
    for date, of_right, of_wrong, places in [*rows, (ALL, right, wrong, "–")]:
        share = 100 * of_wrong["named"] / sum(of_wrong.values())
        cells = [of_right[each] for each in ("clean", "accused", "refused", "not_compared")]
        cells.append(f"{of_wrong['named']} ({share:.0f} %)")
        cells += [of_wrong[each] for each in ("caught", "passed", "refused")]
        cells += [of_wrong.get("not_compared", 0), places]
        lines.append(f"| {date} | {' | '.join(map(str, cells))} |")
    return lines


def main() -> None:
    """Prints the tables of docs/cases.md."""
    cases, distances = read_cases(), read_lines(FOLDER / "truth.jsonl")
    parts = score(cases, read_lines(FOLDER / "expected.jsonl"), distances), first_contacts()
    parts += ground_truth(cases, distances), agreement(cases)
    print("\n\n".join("\n".join(lines) for lines in parts))


if __name__ == "__main__":
    main()
