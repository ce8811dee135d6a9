"""Prints the results of `verify --case` and `--traces`: verdicts, stages, findings."""

import textwrap
from collections.abc import Mapping
from typing import Any

from app.records.case_record import (
    FAULT,
    explanations,
    one_line,
    shortened,
    stage_status,
    stages_of,
    verdict,
)
from app.runtime import console

_WIDTH, _INDENT = 100, 14


def print_case(record: Mapping[str, Any]) -> None:
    """Prints the contents of `verify.json` for a case or traces."""
    for name, run in record["strategies"].items():
        _, sentence = verdict(name, run)
        console.say(sentence)
    console.say()
    _print_setup(record)
    console.say()
    _print_stages(record)
    for each in explanations(record["strategies"]):
        console.say()
        console.say(each.title)
        for name, text in each.facts.items():
            _print_wrapped(name, text)


def _print_setup(record: Mapping[str, Any]) -> None:
    longest = max(record["strategies"].values(), key=lambda run: len(run["steps"]))
    for label, text in record["setup"].items():
        _print_wrapped(label, one_line(text))
    _print_wrapped("steps", ", ".join(shortened(longest["steps"])))
    _print_wrapped("tolerances", one_line(longest["tolerance"]))


def _print_stages(record: Mapping[str, Any]) -> None:
    runs = record["strategies"]
    console.print_table(
        record["comparison"],
        ["stage", *map(one_line, runs)],
        [
            [stage, *(_cell(run, stage) for run in runs.values())]
            for stage in stages_of(runs.values())
        ],
    )


def _cell(run: Mapping[str, Any], stage: str) -> str:
    status, _ = stage_status(run, stage)
    return f"✗ {status}" if status == FAULT else status


def _print_wrapped(label: str, text: str) -> None:
    """Prints a label and a text beside it, wrapped to the terminal's width."""
    lines = textwrap.wrap(text, _WIDTH - _INDENT, break_long_words=False, break_on_hyphens=False)
    if len(label) > _INDENT - 4:
        console.say(f"  {label}")
        label = ""
    for start, line in zip([f"  {label}", *[""] * len(lines)], lines, strict=False):
        console.say(f"{start:<{_INDENT}}{line}")
