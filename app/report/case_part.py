"""Builds the part of a report about a case or traces: verdicts, table of stages, findings."""

from collections.abc import Mapping
from typing import Any

from app.records.case_record import (
    BY_DESIGN,
    CLEAN,
    FAULT,
    explanations,
    one_line,
    shortened,
    stage_status,
    stages_of,
    verdict,
)
from app.report.page_parts import (
    Cell,
    Facts,
    Heading,
    Items,
    Part,
    Table,
    Text,
    devices_text,
)
from app.report.record_finder import Record, reading

_MARKS = {FAULT: "bad", BY_DESIGN: "differs", CLEAN: "good"}
_MOST_TENSORS = 12
_MOST_RUNS = 4  # With more runs, the column of explanations is too narrow.


def case_part(record: Record) -> Part:
    """Reads `verify.json` of a case or of traces.

    Raises:
        OutputError: the file is damaged.
    """
    found = record.load("verify.json")
    if found is None:
        blocks = [Heading(record.label), Text("This verification is not finished: no verdict yet.")]
        return Part(record.label, blocks, [], {})
    with reading(record.path / "verify.json"):
        runs = found["strategies"]
        blocks = [Heading(record.label), Text(_setup(found)), _stages(runs)]
        blocks += [
            Facts(each.title, each.facts, _MARKS[each.status])
            for each in explanations(runs, _MOST_TENSORS)
        ]
        blocks.append(Text(f"Tolerances: {one_line(_longest(runs)['tolerance'])}."))
        return Part(record.label, blocks, [], _environment(runs), verdicts=_verdicts(found))


def _verdicts(found: dict) -> list[Items]:
    """Returns one sentence per strategy, those with faults first."""
    verdicts = [verdict(*each) for each in found["strategies"].items()]
    return [
        Items(sentences, mark)
        for status, mark in _MARKS.items()
        if (sentences := [sentence for each, sentence in verdicts if each == status])
    ]


def _setup(found: dict) -> str:
    steps = ", ".join(shortened(_longest(found["strategies"])["steps"]))
    setup = [
        f"Model {text}" if label == "model" else f"{label}: {text}"
        for label, text in found["setup"].items()
    ]
    return one_line(f"{'. '.join(setup)}. Steps checked: {steps}. {found['comparison']}.")


def _stages(runs: Mapping[str, Mapping[str, Any]]) -> Table:
    has_room = len(runs) <= _MOST_RUNS
    rows: list[list[Cell | str]] = [
        [stage, *[what] * has_room, *(_cell(run, stage) for run in runs.values())]
        for stage, what in stages_of(runs.values()).items()
    ]
    header = ["stage", *["what is checked"] * has_room, *runs]
    return Table("Stages", header, "l" + "w" * (len(header) - 1), rows)


def _cell(run: Mapping[str, Any], stage: str) -> Cell:
    status, causes = stage_status(run, stage)
    text = f"{status}: {', '.join(causes)}" if causes else status
    return Cell(text, _MARKS.get(status, ""))


def _longest(runs: Mapping[str, Mapping[str, Any]]) -> Mapping[str, Any]:
    """Returns the run with the most steps; some strategies may have fewer."""
    return max(runs.values(), key=lambda run: len(run["steps"]))


def _devices(runs: Mapping[str, Mapping[str, Any]]) -> str:
    texts = (devices_text(run["devices"], run["simulated_devices"]) for run in runs.values())
    return ", ".join(dict.fromkeys(texts))


def _environment(runs: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    versions = {
        str(name): str(version)
        for run in runs.values()
        for name, version in run["versions"].items()
    }
    return {"devices": _devices(runs), **versions} if _has_devices(runs) else versions


def _has_devices(runs: Mapping[str, Mapping[str, Any]]) -> bool:
    """Returns whether the devices are known; traces do not name them."""
    return any(run["devices"] for run in runs.values())
