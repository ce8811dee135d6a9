"""Describes the results of `verify --case` and `--traces`: verdicts, stages, findings."""

from collections.abc import Mapping
from typing import Any

from app.report import result
from app.report.result import Block, Facts, Result, Table
from app.verification.case_record import (
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

_STATUSES = {CLEAN: result.GOOD, BY_DESIGN: result.BY_DESIGN, FAULT: result.BAD}


def describe_case(record: Mapping[str, Any]) -> Result:
    """Describes the contents of `verify.json` for a case or traces."""
    runs = record["strategies"]
    verdicts = [verdict(name, run) for name, run in runs.items()]
    longest = max(runs.values(), key=lambda run: len(run["steps"]))
    setup = {one_line(label): one_line(text) for label, text in record["setup"].items()}
    setup |= {
        "steps": ", ".join(shortened(longest["steps"])),
        "tolerances": one_line(longest["tolerance"]),
    }
    stages = Table(
        record["comparison"],
        ["stage", *map(one_line, runs)],
        [
            [stage, *(_cell(run, stage) for run in runs.values())]
            for stage in stages_of(runs.values())
        ],
    )
    blocks: list[Block] = [Facts("", setup), stages]
    blocks += [Facts(each.title, each.facts) for each in explanations(runs)]
    return Result([(_STATUSES[status], sentence) for status, sentence in verdicts], blocks)


def _cell(run: Mapping[str, Any], stage: str) -> str:
    status, _ = stage_status(run, stage)
    return f"✗ {status}" if status == FAULT else status
