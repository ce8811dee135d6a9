"""Writes `report.html`: a standalone page with the results of runs on disk."""

import base64
import contextlib
import dataclasses
import os
import pathlib
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from app.records.files import io_errors_as, make_directory, read_json, write_file
from app.records.history import load_history, load_summary
from app.records.run_directory import CONFIG_FILE, load_run_config
from app.report.result import Facts, Result, Table
from app.report.training_result import caveats_of, describe_trainings, settings_table
from app.runtime import console
from app.runtime.errors import OutputError, reason_of
from lockstep.answer import html
from lockstep.answer.html import is_page

REPORT_FILE = "report.html"
_MEASURED = ("verify", "benchmark")
_MAX_BYTES = 1 << 30  # The measurements of a long verification are larger than any other record.


@dataclasses.dataclass(frozen=True)
class Record:
    """The directory of one run: its path, unique name, command and `config.json`."""

    path: pathlib.Path
    label: str
    command: str
    config: dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Section:
    """The part of the page about one or several records; `caveats` has their names."""

    title: str
    result: Result
    settings: Table
    caveats: Mapping[str, Sequence[str]]
    figure: bytes | None = None


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
    named = [directory for directory in directories if not is_page(directory)]
    content = _render(find_records(named or directories)).encode("utf-8", "replace")
    with io_errors_as(path):
        make_directory(path.parent)
    write_file(path, content)


def _check_replaceable(path: pathlib.Path) -> None:
    """Checks that an existing file is a report, before it is replaced."""
    if not (path.exists() or path.is_symlink()) or is_page(path):
        return
    if path.is_dir():
        raise OutputError(
            f"{path} is a directory; give the name of a file, for example {path / REPORT_FILE}"
        )
    raise OutputError(
        f"{path} exists and is no report of this program; move it away, or give another"
        " name with --out"
    )


def find_records(directories: Sequence[pathlib.Path]) -> list[Record]:
    """Returns the runs in directories, each once, in order.

    A comparison includes its own runs. A folder that is not a run includes the runs directly in it,
    by name; other contents are ignored, with a warning for a `config.json` of another program.

    Raises:
        OutputError: a directory does not exist, or is not a run and holds none.
    """
    found: dict[pathlib.Path, tuple[str, dict]] = {}
    for directory in directories:
        if not directory.is_dir():
            what = "is not a directory" if directory.exists() else "does not exist"
            raise OutputError(f"{directory} {what}; give the directory of a run, see runs/")
        children = [] if _is_run(directory) else _runs_in(directory)
        for run in children or [directory]:
            for path, command, config in _run_and_its_own(run):
                found.setdefault(path.resolve(), (command, config))
    top = os.path.commonpath([path.parent for path in found])
    return [
        Record(path, _shown(os.path.relpath(path, top)), command, config)
        for path, (command, config) in found.items()
    ]


def _run_and_its_own(path: pathlib.Path) -> Iterator[tuple[pathlib.Path, str, dict]]:
    """Yields path, command and configuration of a run; for a comparison, also of its trainings."""
    config = load_run_config(path)  # Raises the missing file.
    strategies = _strategies_of(config)
    if config.get("command") in _MEASURED:
        yield path, config["command"], config
    elif len(strategies) > 1 or (path / "compare.json").exists():
        yield path, "compare", config
        # Other folders are from an earlier comparison of other strategies.
        for child in (path / strategy for strategy in strategies):
            if os.path.lexists(child / CONFIG_FILE):
                yield child, "train", load_run_config(child)
    else:
        yield path, "train", config


def _strategies_of(config: Mapping[str, Any]) -> list[str]:
    """Returns the strategy of a training, or those of a comparison."""
    return str(config.get("strategy")).split(",")


def _runs_in(path: pathlib.Path) -> list[pathlib.Path]:
    """Returns the runs directly in a directory, by name; warns of folders that look like runs."""
    try:
        children = [c for c in sorted(path.iterdir()) if os.path.lexists(c / CONFIG_FILE)]
    except OSError as error:
        raise OutputError(
            f"{path}: {reason_of(error)}; choose a directory that can be read"
        ) from error
    runs = [child for child in children if _is_run(child)]
    others = [_shown(child.name) for child in children if child not in runs]
    if runs and others:
        console.warn(f"{path}: ignored {', '.join(others)}: {CONFIG_FILE} there is not of a run")
    return runs


def _is_run(path: pathlib.Path) -> bool:
    """Returns whether a directory is a run; other programs have a `config.json`, too."""
    with contextlib.suppress(OutputError):
        load_run_config(path)
        return True
    return False


def _shown(name: str) -> str:
    """Returns a file name as text, for any bytes."""
    return name.encode("utf-8", "replace").decode()


def _render(records: Sequence[Record]) -> str:
    sections, caveats = _sections(records), dict[str, list[str]]()
    for section in sections:
        for text, labels in section.caveats.items():
            caveats.setdefault(text, []).extend(labels)
    names = ", ".join(record.label for record in records)
    made = time.strftime("%Y-%m-%d %H:%M:%S %z")
    body = [html.paragraph(f"Made {made} from {names}.", "quiet")]
    for section in sections:
        title = f"{section.title}: " if len(sections) > 1 else ""
        body += [html.verdict_line(s, title + text) for s, text in section.result.verdicts]
    for text, whose in caveats.items():
        title = f" ({', '.join(whose)})" if len(records) > 1 else ""
        body.append(html.paragraph(text + title, "caveat"))
    body += map(_html_of, sections)
    return html.document(f"Lockstep report: {names}", "Lockstep report", body)


def _sections(records: Sequence[Record]) -> list[Section]:
    """Returns a section for each command, and one for all other trainings."""
    sections = list[Section]()
    trainings = [record for record in records if record.command == "train"]
    for record in records:
        if record.command == "train":
            continue
        section, own = _section(record), list[Record]()
        if record.command == "compare":
            paths = [record.path / name for name in _strategies_of(record.config)]
            own = [each for each in trainings if each.path in paths]
            trainings = [each for each in trainings if each not in own]
        sections.append(_with_trainings(section, own) if own else section)
    return [*sections, _trainings(trainings)] if trainings else sections


def _with_trainings(comparison: Section, records: Sequence[Record]) -> Section:
    """Adds lines, curves and settings of its trainings to the section of a comparison."""
    own, result = _trainings(records), comparison.result
    has_table = any(isinstance(block, Table) for block in result.blocks)
    blocks = [each for each in own.result.blocks if not (has_table and isinstance(each, Table))]
    return dataclasses.replace(
        own,
        title=comparison.title,
        result=Result([*result.verdicts, *own.result.verdicts], [*result.blocks, *blocks]),
        caveats={**comparison.caveats, **own.caveats},
    )


def _html_of(section: Section) -> str:
    """Returns a section as HTML: results, figure and settings."""
    lines = ["<section>", f"<h2>{html.text_of(section.title)}</h2>"]
    for block in section.result.blocks:
        if isinstance(block, Table):
            lines.append(_table(block))
        elif isinstance(block, Facts):
            lines.append(html.facts_list(block.title or "Set-up", block.facts))
        elif block:
            lines.append(html.paragraph(block))
    if section.figure:
        # In an image, an SVG file can neither run code nor load files.
        source = f"data:image/svg+xml;base64,{base64.b64encode(section.figure).decode()}"
        alt = html.text_of(f"The figure of {section.title}; its numbers are in the tables.")
        lines.append(f'<div class="scroll" tabindex="0"><img src="{source}" alt="{alt}"></div>')
    lines.append(f"<details><summary>Settings</summary>{_table(section.settings)}</details>")
    return "\n".join([*lines, "</section>"])


def _table(table: Table) -> str:
    return html.table(table.title, table.header, table.rows, table.numeric)


def _section(record: Record) -> Section:
    """Returns the section of a comparison, a verification or a benchmark."""
    path = record.path / f"{record.command}.json"
    settings, figure = dict(record.config), record.path / f"{record.command}.svg"
    with _reading(path):
        if path.exists():
            content = read_json(path, max_bytes=_MAX_BYTES)
            result = Result.from_record(content["shown"])
            settings |= content.get("versions", {})
        else:
            result = Result(blocks=["Not finished: there is no result yet."])
        drawn = figure.read_bytes() if figure.is_file() and not figure.is_symlink() else None
    caveats = {caveat: [record.label] for caveat in result.caveats}
    return Section(record.label, result, settings_table({record.label: settings}), caveats, drawn)


def _trainings(records: Sequence[Record]) -> Section:
    """Returns the section of some trainings."""
    summaries, drawn, settings, caveats = {}, {}, {}, dict[str, list[str]]()
    for record in records:
        name = record.label
        summary, history = load_summary(record.path), load_history(record.path)
        summaries[name], settings[name] = summary, record.config
        if summary is None:
            continue
        with _reading(record.path / "history.jsonl"):
            if [each.epoch for each in history] != list(range(1, len(history) + 1)):
                raise ValueError("epochs that do not follow one another")
        with _reading(record.path / "summary.json"):
            settings[name] = {**record.config, "devices": summary.devices, **summary.versions}
            for caveat in caveats_of(summary):
                caveats.setdefault(caveat, []).append(name)
        if history:
            drawn[name] = summary, history
    figure = None
    with _reading(records[0].path / "summary.json"):
        result, table = describe_trainings(summaries), settings_table(settings)
        if drawn:
            from app.report.accuracy_plot import draw_accuracy
            from app.report.plot_style import render

            figure = render(draw_accuracy(drawn), "svg")
    title = records[0].label if len(records) == 1 else "Trainings"
    return Section(title, result, table, caveats, figure)


@contextlib.contextmanager
def _reading(path: pathlib.Path) -> Iterator[None]:
    """Converts errors of damaged records to `OutputError`.

    Raises:
        OutputError: the record is not in the format that a run writes.
    """
    try:
        yield
    except (OSError, ArithmeticError, AttributeError, LookupError, TypeError, ValueError,
            RecursionError) as error:  # fmt: skip
        raise OutputError(
            f"{path}: not readable as {path.name} ({reason_of(error)}); write it again with"
            " --overwrite, or leave this directory out"
        ) from error
