"""Writes `report.html`: a standalone page about the records of runs."""

import pathlib
import time
from collections.abc import Sequence

from app.records.files import io_errors_as, make_directory, open_regular, write_file
from app.report.case_part import case_part
from app.report.curves_part import curves
from app.report.page_parts import (
    Cell,
    Details,
    Heading,
    Items,
    Part,
    Section,
    Table,
    Text,
    count,
    differing,
)
from app.report.record_finder import Record, find_records
from app.report.runs_part import (
    Run,
    comparison_verdict,
    same_weights,
    speed,
    summary_table,
    verdicts,
)
from app.report.speed_part import benchmark_part, explain_part
from app.report.templates import create_environment
from app.report.verification_part import verify_part
from app.runtime.errors import OutputError

REPORT_FILE = "report.html"
_TEMPLATE = "page.html.jinja"
_GENERATOR = '<meta name="generator" content="Lockstep">'
_HEAD_BYTES = 4096  # The line above is within them.
_NOUNS = {
    "train": "training", "compare": "comparison", "verify": "verification",
    "benchmark": "benchmark", "explain": "explanation",
}  # fmt: skip


def write_report(directories: Sequence[pathlib.Path], path: pathlib.Path) -> None:
    """Writes one page about all runs in `directories`, atomically.

    Args:
        directories: run directories, comparisons, or parents of them.
        path: the file; an earlier report is replaced.

    Raises:
        OutputError: a directory holds no run, a record is damaged, or `path` is another file.
        DiskFullError: no space.
    """
    with io_errors_as(path):
        _check_replaceable(path)
    # `runs/*` may include an earlier report.
    named = [directory for directory in directories if not _is_report(directory)]
    page = _page(find_records(named or directories))
    with io_errors_as(path):
        make_directory(path.parent)
    write_file(path, _render(page).encode("utf-8", "replace"))


def _check_replaceable(path: pathlib.Path) -> None:
    """Checks that an existing file is a report, before it is replaced."""
    if not (path.exists() or path.is_symlink()) or _is_report(path):
        return
    if path.is_dir():
        raise OutputError(
            f"{path} is a directory; give the name of a file, for example {path / REPORT_FILE}"
        )
    raise OutputError(
        f"{path} exists and is no report of this program; move it away, or give another"
        " name with --out"
    )


def _is_report(path: pathlib.Path) -> bool:
    """Returns whether a file was written by `write_report`."""
    try:
        with open_regular(path) as file:
            return _GENERATOR.encode() in file.read(_HEAD_BYTES)
    except (OSError, ValueError):
        return False


def _render(page: dict) -> str:
    return create_environment().get_template(_TEMPLATE).render(page)


def _page(records: Sequence[Record]) -> dict:
    """Returns the values for the template."""
    runs = [Run.load(record) for record in records if record.kind == "train"]
    verified = [
        case_part(record)
        if record.config.get("case") or record.config.get("traces")
        else verify_part(record)
        for record in records
        if record.kind == "verify"
    ]
    measured = [benchmark_part(record) for record in records if record.kind == "benchmark"]
    explained = [explain_part(record) for record in records if record.kind == "explain"]
    parts = [run.part() for run in runs] + verified + measured + explained
    compared = [record for record in records if record.kind == "compare"]
    sections = [
        Section("verdict", "Verdict", _verdicts(compared, parts)),
        Section("results", "Results", [summary_table(runs)] if runs else []),
        Section("curves", "Accuracy and loss", curves(runs) if runs else []),
        Section("weights", "Are the weights the same?", _weights(compared, runs)),
        Section("verification", "Step by step", _blocks(verified)),
        Section("speed", "Speed", [*speed(runs), *_blocks(measured)]),
        Section("explained", "Where the time goes", _blocks(explained)),
        Section("differences", "What the trainings differ in", _differences(runs)),
        Section("environment", "Environment", _environment(parts)),
    ]
    kinds = [record.kind for record in records]
    return {
        "title": f"Lockstep report: {records[0].label}"
        if len(records) == 1 or records[0].kind == "compare"
        else "Lockstep report",
        "made": time.strftime("%Y-%m-%d %H:%M:%S %z"),
        "contents": ", ".join(
            count(kinds.count(kind), noun) for kind, noun in _NOUNS.items() if kind in kinds
        ),
        "labels": [record.label for record in records],
        "banners": _banners(parts),
        "sections": [section for section in sections if section.blocks],
    }


def _verdicts(compared: Sequence[Record], parts: Sequence[Part]) -> list:
    of_comparisons = [item for record in compared for item in comparison_verdict(record)]
    return of_comparisons + [item for part in parts for item in part.verdicts]


def _blocks(parts: Sequence[Part]) -> list:
    return [block for part in parts for block in part.blocks]


def _banners(parts: Sequence[Part]) -> list[tuple[str, list[str]]]:
    """Returns the caveats, each once, with the runs that it concerns."""
    banners: dict[str, list[str]] = {}
    for part in parts:
        for caveat in dict.fromkeys(part.caveats):
            banners.setdefault(caveat, []).append(part.label)
    return list(banners.items())


def _weights(compared: Sequence[Record], runs: Sequence[Run]) -> list:
    return [block for record in compared for block in verdicts(record)] + same_weights(runs)


def _differences(runs: Sequence[Run]) -> list:
    if not runs:
        return []
    same, names, rows = differing([run.label for run in runs], [run.fields() for run in runs])
    caption = "Settings in which trainings differ; marked where they are not as in the first"
    header = ["run", *(name.replace("_", " ") for name in names)]
    blocks: list = [Table(caption, header, "l" * len(header), rows)] * bool(names)
    if not names and len(runs) > 1:
        blocks.append(Text("All trainings were set up alike."))
    title = "The settings" if len(runs) == 1 else "The same in all"
    return [*blocks, Details(title, [_values("Settings", same)])] if same else blocks


def _environment(parts: Sequence[Part]) -> list:
    known = [part for part in parts if part.environment]
    if not known:
        return []
    same, names, rows = differing([p.label for p in known], [p.environment for p in known])
    caption = "Where runs differ; marked where they are not as in the first"
    blocks: list = [_values("The same in all" if len(known) > 1 else "Environment", same)]
    blocks += [Table(caption, ["run", *names], "l" * (len(names) + 1), rows)] * bool(names)
    changes = [f"{part.label}: {change}" for part in known for change in part.changes]
    if changes:
        blocks += [Heading("Changed on the way"), Items(changes)]
    return blocks if same else blocks[1:]


def _values(caption: str, values: dict[str, str]) -> Table:
    rows: list[list[Cell | str]] = [[name, value] for name, value in values.items()]
    return Table(caption, ["name", "value"], "ll", rows)
