"""Writes the page of the benchmark: a section for each kind of processor."""

import itertools
import os
import pathlib
import re
from collections.abc import Iterator
from typing import Any

from app.performance import interval
from app.runtime import kernels
from app.runtime.versions import CPU_KERNELS
from figure import figure_name
from parts import OWN, PARTS, PEERS

_MEASURED_WITH = re.compile(r"^(?P<dates>[\d-]+(?: to [\d-]+)?), no GPU; (?P<versions>.+)\.$", re.M)
_ACCURACIES = "The test accuracies after the epoch of recipe `fast` are"
FOLDER = pathlib.Path(__file__).parent


def name_of_machine(isa: str | None) -> str:
    """Returns the name of this kind of processor, a heading of the page."""
    features = ", ".join(kernels.features(kernels.usable_flags()))
    limit = " limited to" if isa else ":"
    return f"{kernels.processor_name()}{limit} {features}, {os.cpu_count()} cores"


def finished(results: dict[str, Any]) -> dict[str, Any]:
    """Returns the results of the parts of which every round was measured."""
    whole = {name for name, (done, of) in results["rounds"].items() if done == of}
    return results | {"parts": {n: p for n, p in results["parts"].items() if n in whole}}


def render(machine: str, results: dict[str, Any], page: str = "") -> str:
    """Returns the results of a kind of processor as Markdown: its section of the page.

    Args:
        machine: the kind of processor.
        results: what was measured.
        page: the page as it is; rows of trainings that were not measured stay.
    """
    results = finished(results)
    measured = {PARTS[name].title for name in results["parts"]}
    earlier = _sections(page).get(f"## {machine}", "")
    header, rows = summary(results)[:2], _rows_by_title(earlier) | _rows_by_title(summary(results))
    dates = {results["dates"][name] for name in results["parts"]}
    versions = {n: v for n, v in results["versions"].items() if n != CPU_KERNELS}
    if rows.keys() - measured and (found := _MEASURED_WITH.search(earlier)):
        dates.update(found["dates"].split(" to "))
        versions = dict(each.split(" ") for each in found["versions"].split(", ")) | versions
    lines = [
        f"## {machine}", "",
        f"{' to '.join([*sorted(dates)[:1], *sorted(dates)[1:][-1:]])}, no GPU;"
        f" {', '.join(map(' '.join, versions.items()))}.",
        *("", f"![ratios of times with their intervals]({figure_name(machine)})", ""),
        *(*header, *itertools.chain.from_iterable(rows.values()), ""),
    ]  # fmt: skip
    lines += [f"Not measured: {reason}.\n" for reason in results["left_out"]]
    if missing := [part.title for part in PARTS.values() if part.title not in rows]:
        lines += [f"Not measured yet: {'; '.join(missing)}.", ""]
    tested = [each["accuracy"] for part in results["parts"].values() for each in part.values()
              if "accuracy" in each]  # fmt: skip
    if tested:  # The programs of recipe fast.
        text = f"{_ACCURACIES} {min(tested):.4f} to {max(tested):.4f}."
    else:
        text = next((line for line in earlier.splitlines() if line.startswith(_ACCURACIES)), "")
    return "\n".join([*lines, *([text, ""] if text else [])])


def with_section(page: str, section: str) -> str:
    """Returns the page with a section in the place of the one of the same heading, or added."""
    preamble = (FOLDER / "preamble.md").read_text(encoding="utf-8")
    by_heading = _sections(page) | _sections(section)
    return "\n".join(text.strip("\n") + "\n" for text in (preamble, *by_heading.values()))


def _sections(page: str) -> dict[str, str]:
    """Returns the sections of a page by their headings."""
    sections = re.split(r"^(?=## )", page, flags=re.MULTILINE)[1:]
    return {text.splitlines()[0]: text for text in sections}


def _rows_by_title(table: str | list[str]) -> dict[str, list[str]]:
    """Returns the rows of a table or of a text with one, by the title of their training."""
    lines = table.splitlines() if isinstance(table, str) else table
    rows, title = dict[str, list[str]](), ""
    for line in [line for line in lines if line.startswith("| ")][2:]:
        title = line.split("|")[1].strip() or title
        rows.setdefault(title, []).append(line)
    return rows


def comparisons(results: dict[str, Any]) -> Iterator[tuple[str, str, str, interval.Interval]]:
    """Yields (title of a part, program, base, ratio of their times for an image)."""
    for part, programs in results["parts"].items():
        for name, base in [*_against_best(programs), *PARTS[part].ratios]:
            if name in programs and base in programs:  # Some are left out.
                ratio = interval.ratio(programs[name]["secs"], programs[base]["secs"])
                yield PARTS[part].title, name, base, ratio


def summary(results: dict[str, Any]) -> list[str]:
    """Returns a table of this project against each peer's best, and the other ratios.

    A training's title is in the first of its rows.
    """
    lines = [
        "| Training | Program | Images/s | Over | Images/s | Ratio of times |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    programs = {PARTS[name].title: part for name, part in results["parts"].items()}
    shown = ""
    for title, name, base, ratio in comparisons(results):
        rates = [1 / interval.median(programs[title][each]["secs"]).value for each in (name, base)]
        lines.append(
            f"| {title if title != shown else ''} | {name} | {rates[0]:,.0f} | {base} |"
            f" {rates[1]:,.0f} | {ratio.value:.3f} ({ratio.low:.3f}–{ratio.high:.3f}) |"
        )
        shown = title
    return lines


def _against_best(programs: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Yields `manual` in a precision and the fastest program of each peer.

    Keras with the variable is a peer of its own: users may have either. For bfloat16, the peer's
    fastest program in any precision is used: bfloat16 may be slower there.
    """
    for name in [name for name in programs if name in OWN]:
        for peer in PEERS:
            of_peer = [other for other in programs if other.startswith(peer)]
            if "bfloat16" not in name:
                of_peer = [other for other in of_peer if "bfloat16" not in other]
            with_variable = [other for other in of_peer if "oneDNN" in other]
            for each in ([n for n in of_peer if n not in with_variable], with_variable):
                if each:
                    yield name, min(each, key=lambda n: interval.median(programs[n]["secs"]).value)
