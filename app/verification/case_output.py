"""What `verify --case` prints: a verdict for each strategy, then the stages, then each finding."""

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
from app.report.page_parts import devices_text
from app.runtime import console

_WIDTH, _INDENT = 100, 14


def print_case(record: Mapping[str, Any]) -> None:
    """Prints what `verify.json` says about a case."""
    for name, run in record["strategies"].items():
        _, sentence = verdict(record["case"], name, run)
        console.say(sentence)
    console.say()
    _print_setup(record)
    console.say()
    _print_stages(record["strategies"])
    for each in explanations(record["strategies"]):
        console.say()
        console.say(each.title)
        for name, text in each.facts.items():
            _print_wrapped(name, text)


def _print_setup(record: Mapping[str, Any]) -> None:
    runs = record["strategies"].values()
    largest = max(runs, key=lambda run: len(run["devices"]))
    longest = max(runs, key=lambda run: len(run["steps"]))
    devices = devices_text(largest["devices"], largest["simulated_devices"])
    _print_wrapped(
        "model",
        f"{one_line(record['model'])}, batch {record['global_batch_size']}, seed {record['seed']},"
        f" {devices}, TF32 off",
    )
    _print_wrapped("steps", ", ".join(shortened(longest["steps"])))
    _print_wrapped("tolerances", one_line(longest["tolerance"]))


def _print_stages(runs: Mapping[str, Mapping[str, Any]]) -> None:
    console.print_table(
        "Each stage of each step, compared with one device that starts from the same state",
        ["stage", *runs],
        [
            [stage, *(_cell(run, stage) for run in runs.values())]
            for stage in stages_of(runs.values())
        ],
    )


def _cell(run: Mapping[str, Any], stage: str) -> str:
    status, _ = stage_status(run, stage)
    return f"✗ {status}" if status == FAULT else status


def _print_wrapped(label: str, text: str) -> None:
    """Prints a label and a text beside it, in lines of a width that a terminal has."""
    lines = textwrap.wrap(text, _WIDTH - _INDENT, break_long_words=False, break_on_hyphens=False)
    for start, line in zip([f"  {label}", *[""] * len(lines)], lines, strict=False):
        console.say(f"{start:<{_INDENT}}{line}")
