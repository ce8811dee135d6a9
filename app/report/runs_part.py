"""Builds the part of a report about trainings: results, curves, speed and weights."""

import dataclasses
import pathlib
from collections.abc import Sequence

from app.records.caveats import (
    DATASET_CAVEATS,
    TIMING_CAVEAT,
    TRAINING_DATA_CAVEAT,
    dataset_title,
    injected_fault_caveat,
)
from app.records.event_reader import StepScalars, load_steps
from app.records.history import EpochRecord, Summary, load_history, load_summary
from app.records.run_log_reader import load_attempts
from app.report.charts import Figure, bar_chart
from app.report.page_parts import (
    Cell,
    Items,
    Part,
    Table,
    Text,
    count,
    devices_text,
    number,
    whole,
)
from app.report.record_finder import Record, reading

_SHORT_HASH = 8


@dataclasses.dataclass(frozen=True)
class Run:
    """One training.

    Attributes:
        label: name on the page.
        config: configuration of the training.
        summary: its summary; None before the end of the first epoch.
        history: the finished epochs.
        mismatch: the step and cause of the mismatch that ended it; "" without one.
        steps: scalars over the steps of a run of one epoch.
    """

    label: str
    config: dict
    summary: Summary | None
    history: list[EpochRecord]
    mismatch: str = ""
    steps: Sequence[StepScalars] = ()

    @classmethod
    def load(cls, record: Record) -> "Run":
        """Reads the records of a training.

        Raises:
            OutputError: a record is damaged.
        """
        summary, history = load_summary(record.path), load_history(record.path)
        with reading(record.path / "history.jsonl"):
            if [each.epoch for each in history] != list(range(1, len(history) + 1)):
                raise ValueError("epochs that do not follow one another")
        if summary:
            with reading(record.path / "summary.json"):
                _check_texts(summary.devices + summary.changes + list(summary.versions.values()))
        mismatch = _find_mismatch(record.path)
        steps = load_steps(record.path) if len(history) == 1 else ()
        return cls(record.label, record.config, summary, history, mismatch, steps)

    def part(self) -> Part:
        """Returns the caveats and the environment of the run."""
        mismatches = [f"It ended at a verified step: {self.mismatch}."] * bool(self.mismatch)
        if self.summary is None:
            return Part(self.label, [], mismatches, {})
        summary = self.summary
        fault = summary.injected_fault
        caveats = mismatches + [injected_fault_caveat(fault)] * bool(fault)
        caveats += [DATASET_CAVEATS[d] for d in [summary.dataset] if d in DATASET_CAVEATS]
        caveats += [TRAINING_DATA_CAVEAT] * summary.evaluates_training_data
        caveats += [TIMING_CAVEAT] * summary.simulated_devices
        data = "data" if summary.case else "images"
        environment = {
            "devices": devices_text(summary.devices, summary.simulated_devices),
            "threads of an operation": str(summary.intra_op_threads or "TensorFlow's choice"),
            **summary.versions,
            data: dataset_title(summary.dataset),
            f"SHA-256 of the {data}": summary.dataset_sha256,
        }
        return Part(self.label, [], caveats, environment, summary.changes)

    def fields(self) -> dict[str, str]:
        """Returns the settings of the run: actual ones if recorded, else the configured ones."""
        names = [name for name in self.config if name not in ("written_by", "inject")]
        fields = {name: self.config[name] for name in names}
        if self.summary:
            known = dataclasses.asdict(self.summary)
            more = ("num_replicas", "devices", "simulated_devices", "intra_op_threads")
            fields |= {name: known[name] for name in (*names, *more) if name in known}
            fields["injected_fault"] = self.summary.injected_fault or "none"
        return {name: _shown(value) for name, value in fields.items()}


def _find_mismatch(run_dir: pathlib.Path) -> str:
    """Returns the mismatch that ended the last attempt of a run; "" for any other end."""
    try:
        attempts = load_attempts(run_dir)
    except (OSError, ValueError):  # The log may be missing; nothing else depends on it.
        return ""
    stop = attempts[-1].stop if attempts else None
    if stop is None or stop["status"] != "mismatch":
        return ""
    return str(stop.get("error", "")).rpartition("; ")[0]


def _check_texts(values: Sequence) -> None:
    for value in values:
        if not isinstance(value, str):
            raise TypeError(f"{value!r:.80} in place of a text")


def _shown(value: object) -> str:
    if value is None:
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list):
        return ", ".join(map(str, value))
    return f"{value:g}" if isinstance(value, float) else str(value)


def summary_table(runs: Sequence[Run]) -> Table:
    """Returns a row for each run, with the numbers of its `summary.json`."""
    noun = "examples" if any(run.summary and run.summary.case for run in runs) else "images"
    header = (
        *("run", "strategy", "model", "recipe", "devices", "test accuracy", "best", "epochs"),
        *("sec/epoch", f"{noun}/s", "status", "verified steps", "weights"),
    )
    rows = [_summary_row(run) for run in runs]
    return Table("Every training with its result", header, "lllllrrlrrlll", rows)


def _summary_row(run: Run) -> list[Cell | str]:
    s = run.summary
    if s is None:
        return _row_without_result(run)
    status = Cell(s.status) if s.status == "finished" else _unfinished(run, "not finished")
    return [
        run.label,
        s.strategy,
        s.model,
        s.recipe or "–",
        Cell(devices_text(s.devices, s.simulated_devices), title=", ".join(s.devices)),
        f"loss {s.test_loss:.4f}" if s.test_accuracy is None else number(s.test_accuracy, ".4f"),
        number(s.best_test_accuracy, ".4f"),
        f"{len(run.history)} of {s.epochs}",
        number(s.epoch_sec, ".2f"),
        number(s.images_per_sec),
        Cell("injected fault", "bad") if s.injected_fault else status,
        _verified(s),
        Cell(s.weights_sha256[:_SHORT_HASH], title=s.weights_sha256),
    ]


def _unfinished(run: Run, text: str) -> Cell:
    return Cell("mismatch", "bad", run.mismatch) if run.mismatch else Cell(text, "differs")


def _verified(summary: Summary) -> Cell:
    if not summary.verified_steps:
        return Cell("–")
    wrong = summary.mismatches
    mismatches = f", {wrong:,} mismatch{'es' * (wrong > 1)}" if wrong else ""
    return Cell(f"{whole(summary.verified_steps)}{mismatches}", "bad" if wrong else "")


def _row_without_result(run: Run) -> list[Cell | str]:
    asked = run.fields()

    def shown(*names: str) -> list[str]:
        return [asked.get(name, "–") for name in names]

    return [
        run.label,
        *shown("strategy", "model", "recipe"),
        *["–"] * 3,
        f"0 of {asked.get('epochs', '–')}",
        *["–"] * 2,
        _unfinished(run, "no epoch finished"),
        "–",
        "–",
    ]


def speed(runs: Sequence[Run]) -> list:
    """Returns a figure with the epoch time and the images per second of each run."""
    measured = [(run.label, run.summary) for run in runs if run.summary]
    if not measured:
        return []
    noun = "examples" if any(summary.case for _, summary in measured) else "images"
    charts = [
        bar_chart(
            "seconds for an epoch",
            [(label, summary.epoch_sec, None, None) for label, summary in measured],
            form=".2f",
            unit="s",
        ),
        bar_chart(
            f"{noun} a second",
            [(label, summary.images_per_sec, None, None) for label, summary in measured],
            form=",.0f",
            unit="",
        ),
    ]
    rows = [
        [
            label,
            number(summary.epoch_sec, ".2f"),
            number(summary.images_per_sec),
            number(summary.compile_sec, ".2f"),
            number(summary.total_sec, ".1f"),
        ]
        for label, summary in measured
    ]
    header = ["run", "sec/epoch", f"{noun}/s", "sec until compiled", "sec in all"]
    table = Table("Times of each training", header, "lrrrr", rows)
    note = "Medians over the epochs of one run each; tracing and evaluation are left out."
    if any(summary.simulated_devices for _, summary in measured):
        note += f" There are {TIMING_CAVEAT}."
    return [Figure("Speed of each training", charts, [], [table], note)]


def same_weights(runs: Sequence[Run]) -> list:
    """Returns which runs ended with bitwise identical weights, by their hash."""
    groups: dict[str, list[str]] = {}
    for run in runs:
        if run.summary:
            groups.setdefault(run.summary.weights_sha256, []).append(run.label)
    if sum(map(len, groups.values())) < 2:
        return []
    same = {digest: labels for digest, labels in groups.items() if len(labels) > 1}
    if not same:
        return [Text("No two of these trainings have bitwise identical weights.")]
    rows: list[list[Cell | str]] = [
        [", ".join(labels), count(len(labels), "run"), Cell(digest[:_SHORT_HASH], title=digest)]
        for digest, labels in same.items()
    ]
    header = ["trainings", "how many", "SHA-256 of the weights"]
    return [Table("Trainings with bitwise identical weights", header, "lrl", rows)]


def verdicts(record: Record) -> list:
    """Returns the results of `compare.json` for each pair of runs.

    Raises:
        OutputError: the file is damaged.
    """
    compared = record.load("compare.json")
    if compared is None:
        return [Text(f"{record.label}: the comparison is not finished, there is no verdict yet.")]
    with reading(record.path / "compare.json"):
        rows = [_verdict_row(verdict) for verdict in compared["verdicts"]]
        explanations: dict[str, list[str]] = {}
        for verdict in compared["verdicts"]:
            if verdict["explanation"] and verdict["difference"]["tensor"]:
                pair = " – ".join(verdict["strategies"])
                explanations.setdefault(verdict["explanation"], []).append(pair)
    header = ["pair", "steps", "weights", "apart by", "relative", "in"]
    table = Table(f"{record.label}: final weights of each pair", header, "lrlrrl", rows)
    return [table, *(Text(f"{', '.join(of)}: {text}") for text, of in explanations.items())]


def comparison_verdict(record: Record) -> list[Items]:
    """Returns the verdict of a comparison in one sentence; none if it is not finished.

    Raises:
        OutputError: its record is damaged.
    """
    compared = record.load("compare.json") or {}
    with reading(record.path / "compare.json"):
        if not compared.get("verdict"):
            return []
        wrong = any(verdict.get("is_unexpected") for verdict in compared["verdicts"])
        return [Items([f"{record.label}: {compared['verdict']}"], "bad" if wrong else "good")]


def _verdict_row(verdict: dict) -> list[Cell | str]:
    first, second = verdict["strategies"]
    difference = verdict["difference"]
    same = difference["tensor"] == ""
    if same:
        outcome = Cell("bit-identical", "good")
    elif verdict.get("is_unexpected", False):
        outcome = Cell("different, not expected", "bad")
    else:
        outcome = Cell("different, as expected")
    return [
        f"{first} – {second}",
        whole(verdict["num_steps"]),
        outcome,
        "0" if same else number(difference["absolute"], ".2g"),
        "0" if same else number(difference["relative"], ".2g"),
        "" if same else str(difference["tensor"]),
    ]
