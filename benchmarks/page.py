"""Writes the page of the benchmark: a section for each kind of processor."""

import itertools
import os
import pathlib
import re
from collections.abc import Iterable, Iterator
from typing import Any

from app.performance import interval
from app.runtime import kernels
from app.runtime.versions import CPU_KERNELS
from figure import figure_name
from parts import OWN, PARTS, PEERS

_MEASURED = re.compile(r"^(?P<when>\d{4}-.*, no GPU; .+?)(?:: (?P<titles>.*))?\.$", re.MULTILINE)
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
        results: times and accuracies of the programs.
        page: text of the existing page, of which the rows of trainings that are not in `results`
            stay.
    """
    results = finished(results)
    earlier = _sections(page).get(f"## {machine}", "")
    new, header = summary(results), summary(results)[:2]
    rows = _rows_by_title(earlier.splitlines()) | _rows_by_title(new)
    rows = {part.title: rows[part.title] for part in PARTS.values() if part.title in rows}
    lines = [
        f"## {machine}", "",
        *_measured_lines(rows, _when_measured(earlier, rows) | _when(results)),
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


def _when(results: dict[str, Any]) -> dict[str, str]:
    """Returns title of a training → date and versions of its measurement."""
    versions = ", ".join(
        f"{name} {version}" for name, version in results["versions"].items() if name != CPU_KERNELS
    )
    dates = results["dates"]
    return {PARTS[name].title: f"{dates[name]}, no GPU; {versions}" for name in results["parts"]}


def _when_measured(section: str, titles: Iterable[str]) -> dict[str, str]:
    """Returns the same for a section; a line without titles is about all trainings."""
    found = [(each["when"], each["titles"]) for each in _MEASURED.finditer(section)]
    return {
        title: when
        for when, listed in found
        for title in (listed.split("; ") if listed else titles)
    }


def _measured_lines(titles: Iterable[str], when: dict[str, str]) -> list[str]:
    """Returns a line for each date and set of versions, with its trainings if there are others."""
    by_when = dict[str, list[str]]()
    for title in titles:
        by_when.setdefault(when[title], []).append(title)
    if len(by_when) < 2:
        return [f"{each}." for each in by_when]
    lines = [f"{each}: {'; '.join(of)}." for each, of in by_when.items()]
    return [*itertools.chain.from_iterable(zip(lines, [""] * len(lines), strict=True))][:-1]


def with_section(page: str, section: str) -> str:
    """Returns the page with a section in the place of the one of the same heading, or added."""
    preamble = (FOLDER / "preamble.md").read_text(encoding="utf-8")
    by_heading = _sections(page) | _sections(section)
    return "\n".join(text.strip("\n") + "\n" for text in (preamble, *by_heading.values()))


def _sections(page: str) -> dict[str, str]:
    """Returns the sections of a page by their headings."""
    sections = re.split(r"^(?=## )", page, flags=re.MULTILINE)[1:]
    return {text.splitlines()[0]: text for text in sections}


def _rows_by_title(lines: Iterable[str]) -> dict[str, list[str]]:
    """Returns the rows of the table among some lines, by the title of their training."""
    rows, title = dict[str, list[str]](), ""
    table = [line for line in lines if line.startswith("| ")]
    for line in table[2:]:
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
