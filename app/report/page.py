"""Writes `report.html`: a standalone page with the results of runs, from their records on disk."""

import base64
import os
import pathlib
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from app import console
from app.errors import OutputError
from app.records import files
from app.records.history import TIMING_CAVEAT, Run, caveats, load_history, load_summary
from app.records.run_directory import CONFIG_FILE, is_run, load_run_config
from lockstep.answer import html
from lockstep.answer.text import named_steps

REPORT_FILE = "report.html"
IDENTICAL, DIFFERENT = "bit-identical", "different"  # Outcomes of a pair of trainings.
Rows = list[list[str]]


class _Record(NamedTuple):
    """The directory of one run."""

    path: pathlib.Path
    label: str  # Its name on the page.
    command: str
    config: dict[str, Any]


def write_report(directories: Sequence[pathlib.Path], path: pathlib.Path) -> None:
    """Writes one page about the runs, comparisons and parents of them in `directories`, atomically.

    Raises OutputError for a directory without a run, a damaged record, or another file at `path`.
    """
    with files.io_errors_as(path):
        if os.path.lexists(path) and not html.is_page(path):
            raise OutputError(
                f"{path} exists and is no report of this program; give the name of another file"
                " with --out"
            )
    # `runs/*` may include an earlier report.
    named = [directory for directory in directories if not html.is_page(directory)]
    content = _page(_find_records(named or directories)).encode("utf-8", "replace")
    with files.io_errors_as(path):
        files.make_directory(path.parent)
    files.write_file(path, content)


def _find_records(directories: Sequence[pathlib.Path]) -> list[_Record]:
    """Returns the runs in directories, each once: a comparison with its own, a folder's by name."""
    found: dict[pathlib.Path, dict[str, Any]] = {}
    for directory in directories:
        if not directory.is_dir():
            what = "is not a directory" if directory.exists() else "does not exist"
            raise OutputError(f"{directory} {what}; give the directory of a run, see runs/")
        inner = []
        if not is_run(directory):
            with files.io_errors_as(directory):
                inner = [child for child in sorted(directory.iterdir()) if is_run(child)]
        for run in inner or [directory]:
            config = load_run_config(run)  # Raises if there is none.
            found.setdefault(run.resolve(), config)
            # Other folders are from an earlier comparison of other strategies.
            names = config.get("strategies", []) if config.get("command") == "compare" else []
            for child in (run / str(name) for name in names):
                if os.path.lexists(child / CONFIG_FILE):
                    found.setdefault(child.resolve(), load_run_config(child))
    top, records = os.path.commonpath([path.parent for path in found]), []
    for path, config in found.items():
        label = os.path.relpath(path, top).encode("utf-8", "replace").decode()
        records.append(_Record(path, label, str(config.get("command", "train")), config))
    return records


def _page(records: Sequence[_Record]) -> str:
    names = ", ".join(record.label for record in records)
    made = time.strftime("%Y-%m-%d %H:%M:%S %z")
    body = [html.paragraph(f"Made {made} from {names}.", "quiet")]
    trainings = [record for record in records if record.command == "train"]
    describe = {"compare": _comparison, "verify": _verification, "benchmark": _benchmark}
    for record in records:
        if record.command not in describe:
            continue
        body.append(f"<section><h2>{html.text_of(record.label)}</h2>")
        path = record.path / f"{record.command}.json"
        with files.damage_as_error(path):
            if path.exists():
                body += describe[record.command](files.read_json(path))
            else:
                body.append(html.paragraph("Not finished: there is no result yet."))
        own = [each for each in trainings if each.path.parent == record.path]
        trainings = [each for each in trainings if each not in own]
        short = [each._replace(label=each.path.name) for each in own]
        body += [*(_trainings(short) if short else [_settings([record])]), "</section>"]
    if trainings:
        title = trainings[0].label if len(trainings) == 1 else "Trainings"
        body += [f"<section><h2>{html.text_of(title)}</h2>", *_trainings(trainings), "</section>"]
    return html.document(f"Lockstep report: {names}", "Lockstep report", body)


def _table(header: Sequence[str], rows: Rows) -> str:
    columns = zip(header, *rows, strict=True)
    return html.table("", header, rows, [console.is_numeric(cells) for _, *cells in columns])


def _trainings(records: Sequence[_Record]) -> list[str]:
    runs: dict[str, Run] = {}
    lines, named = list[str](), dict[str, list[str]]()  # A sentence → the trainings that it is of.
    for record in records:
        summary, name = load_summary(record.path), record.label
        if summary is None:
            lines.append(html.paragraph(f"{name}: no epoch is finished yet"))
            continue
        history = load_history(record.path)
        with files.damage_as_error(record.path / "summary.json"):
            if not history:
                raise ValueError("a summary without a history")
            runs[name] = summary, history
            if summary["status"] != "finished":
                done = f"{len(history)} of {summary['epochs']} epochs"
                lines.append(html.paragraph(f"{name}: not finished, {done}"))
            timing = [TIMING_CAVEAT] if summary["simulated_devices"] else []
            for caveat in (*caveats(summary), *timing):
                named.setdefault(caveat, []).append(name)
    above = []
    for caveat, names in named.items():
        of = f" ({', '.join(names)})" if len(records) > 1 else ""
        above.append(html.paragraph(caveat + of, "caveat"))
    with files.damage_as_error(records[0].path / "summary.json"):
        if runs:
            summaries = {name: summary for name, (summary, _) in runs.items()}
            table = _table(*results_table(summaries))
            lines = [table, *lines, *_equal_weights(summaries), _figure(runs)]
    return [*above, *lines, _settings(records)]


def _equal_weights(summaries: Mapping[str, Mapping[str, Any]]) -> list[str]:
    groups: dict[str, list[str]] = {}
    for name, summary in summaries.items():
        groups.setdefault(summary["weights_sha256"], []).append(name)
    same = [", ".join(names) for names in groups.values() if len(names) > 1]
    return [html.paragraph(f"bitwise identical weights: {names}") for names in same]


def results_table(summaries: Mapping[str, Mapping[str, Any]]) -> tuple[list[str], Rows]:
    """Returns header and rows of trainings, by name; the speed-up over `single` on real devices."""
    single = next((s for s in summaries.values() if s["strategy"] == "single"), None)
    if any(s["simulated_devices"] for s in summaries.values()):
        single = None
    rows = []
    for name, s in summaries.items():
        simulated = " simulated" if s["simulated_devices"] else ""
        row = [name, f"{len(s['devices'])}{simulated}", f"{s['test_accuracy']:.4f}"]
        row += [f"{s['epoch_sec']:.2f}", f"{s['images_per_sec']:,.0f}"]
        if single:  # An epoch takes no time if all its steps are verified.
            row.append(f"{single['epoch_sec'] / s['epoch_sec']:.2f}x" if s["epoch_sec"] else "–")
        rows.append(row)
    header = ["run", "devices", "test acc", "sec/epoch", "images/s"]
    return [*header, "speed-up"] if single else header, rows


def _figure(runs: Mapping[str, Run]) -> str:
    from app.report.plots import draw_accuracy, render

    # In an image, an SVG file can neither run code nor load files.
    source = base64.b64encode(render(draw_accuracy(runs), "svg")).decode()
    image = f'<img src="data:image/svg+xml;base64,{source}" alt="Accuracy over the epochs">'
    return f'<div class="scroll" tabindex="0">{image}</div>'


def _settings(records: Sequence[_Record]) -> str:
    """Returns a table with the settings of several records; those that differ first, marked."""
    rows = []
    for name in dict.fromkeys(name for record in records for name in record.config):
        cells = [_cell(record.config.get(name)) for record in records]
        rows.append([f"≠ {name}" if len(set(cells)) > 1 else name, *cells])
    rows.sort(key=lambda row: not row[0].startswith("≠"))
    table = _table(["setting", *(record.label for record in records)], rows)
    return f"<details><summary>Settings</summary>{table}</details>"


def _cell(value: object) -> str:
    if value is None:
        return "–"
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, dict):
        return ", ".join(f"{name} {_cell(each)}" for name, each in value.items())
    return ", ".join(map(_cell, value)) if isinstance(value, list) else str(value)


def _facts(title: str, facts: Mapping[str, Any]) -> str:
    return html.facts_list(title, {str(name): _cell(value) for name, value in facts.items()})


def _comparison(content: Mapping[str, Any]) -> list[str]:
    return [html.verdict_line(*pairs_verdict(content["pairs"])), *_pairs(content["pairs"])]


def pairs_verdict(pairs: Sequence[Mapping[str, Any]]) -> tuple[str, str]:
    """Returns the kind of the comparison of final weights, and one sentence."""
    outcomes = {pair["outcome"] for pair in pairs}
    if DIFFERENT in outcomes:
        return html.BAD, "Weights differ that should be bitwise identical."
    if outcomes <= {IDENTICAL}:
        return html.GOOD, "All trainings end with bitwise identical weights."
    same = [" and ".join(pair["trainings"]) for pair in pairs if pair["outcome"] == IDENTICAL]
    text = "The trainings end with different weights"
    if same:
        text = f"{'; '.join(same)} end with bitwise identical weights; the others differ"
    return html.GOOD, f"{text}, as expected."


def _pairs(pairs: Sequence[Mapping[str, Any]]) -> list[str]:
    rows = []
    for pair in pairs:
        sizes = [_cell(pair["absolute"]), _cell(pair["relative"]), pair["where"] or "–"]
        if pair["outcome"] == IDENTICAL:
            sizes = ["–", "–", "–"]
        rows.append([" – ".join(pair["trainings"]), pair["outcome"], *sizes])
    header = ["pair", "outcome", "difference", "relative", "in"]
    reasons = dict.fromkeys(pair["why"] for pair in pairs if pair["why"])
    return [_table(header, rows), *map(html.paragraph, reasons)] if rows else []


def _verification(content: Mapping[str, Any]) -> list[str]:
    trainings, lines = content["trainings"], list[str]()
    for verdict in trainings.values():
        lines.append(html.verdict_line(html.kind_of(verdict["status"]), verdict["sentence"]))
    for name, verdict in trainings.items():
        lines += [html.paragraph(f"{name}: {note}") for note in verdict["notes"]]
        if verdict["facts"]:
            lines.append(_facts(name, verdict["facts"]))
    lines.append(html.nodes_table({name: each["nodes"] for name, each in trainings.items()}))
    steps = {f"{name}, verified": named_steps(each["steps"]) for name, each in trainings.items()}
    facts = {name: fact for name, fact in content["facts"].items() if fact != ""}
    return [*lines, *_pairs(content["pairs"]), _facts("Set-up", {**facts, **steps})]


def _benchmark(content: Mapping[str, Any]) -> list[str]:
    rows = [
        [
            f"{case['strategy']} on {console.count(case['num_devices'], 'device')}",
            *interval_cells(case["images_per_sec"], ",.0f"),
            *interval_cells(case["speedup"], ".3f"),
        ]
        for case in content["cases"]
    ]
    header = ["", "images/s", "95 % interval", "speed-up", "95 % interval"]
    simulated = content["facts"]["simulated_devices"]
    caveat = [html.paragraph(TIMING_CAVEAT, "caveat")] if simulated else []
    return [*caveat, _table(header, rows), _facts("Set-up", content["facts"])]


def interval_cells(found: Mapping[str, float] | None, form: str) -> list[str]:
    """Returns the median and the interval of a ratio as cells of a table."""
    if found is None:
        return ["–", "–"]
    return [f"{found['median']:{form}}", f"{found['low']:{form}}–{found['high']:{form}}"]
