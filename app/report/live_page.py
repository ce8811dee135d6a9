"""The page of a training in progress: what it shows now, as HTML in parts that are replaced."""

import base64
import dataclasses
import hashlib
import os
import pathlib
import time
from collections.abc import Sequence
from typing import Any

from markupsafe import Markup

from app.records.caveats import (
    DATASET_CAVEATS,
    TIMING_CAVEAT,
    dataset_title,
    injected_fault_caveat,
)
from app.records.event_reader import EventReader
from app.report.charts import Figure, Look, line_chart
from app.report.live_run import LiveRun, find_newest_run
from app.report.page_parts import Table, count, devices_text, is_finite, number, whole
from app.report.record_finder import MEASURED
from app.report.templates import create_environment

SCRIPT = (pathlib.Path(__file__).parent / "live.js").read_text(encoding="utf-8")
_SCRIPT_SHA256 = base64.b64encode(hashlib.sha256(SCRIPT.encode()).digest()).decode()
# Inline styles are needed by the charts; scripts are not, but for ours.
SECURITY_POLICY = (
    f"default-src 'none'; script-src 'sha256-{_SCRIPT_SHA256}'; style-src 'unsafe-inline';"
    " connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none';"
    " frame-ancestors 'none'"
)
_REFRESH_SEC, _REFRESH_SEC_AT_END = 2, 10
_MOST_OF_A_CORE = 0.05  # What drawing may take from the training.
_MOST_EPOCHS = 50
_TRAINING, _TEST = Look(0, 0, 1.8), Look(1, 1, 2.4)
# Title, tag of the training's values, field of the test's, format, largest value.
_CHARTS = (
    ("loss", "steps/loss", "test_loss", ".4f", float("inf")),
    ("accuracy", "steps/accuracy", "test_accuracy", ".4f", 1.0),
    ("{}s per second", "steps/images_per_sec", "", ",.0f", float("inf")),
)
_COLUMNS = {
    "step": ("steps", ",.0f"),
    "train_loss": ("train loss", ".4f"),
    "train_accuracy": ("train accuracy", ".4f"),
    "test_loss": ("test loss", ".4f"),
    "test_accuracy": ("test accuracy", ".4f"),
    "epoch_sec": ("seconds", ".2f"),
    "images_per_sec": ("{}s/s", ",.0f"),
}


@dataclasses.dataclass(frozen=True)
class _Tile:
    """A number with its name; `mark` is "good", "bad" or ""."""

    name: str
    value: str
    note: str = ""
    mark: str = ""


class LivePage:
    """The page of the newest training in some directories.

    Args:
        directories: of trainings, of comparisons, or folders of such; they need not exist yet.
    """

    def __init__(self, directories: Sequence[pathlib.Path]) -> None:
        self._directories, self._templates = directories, create_environment()
        self._open(directories[0])

    def update(self) -> dict[str, Any]:
        """Reads what was written since the last update, and returns what the page shows now.

        Returns:
            "title" of the page, "parts" as id → HTML, and after how many seconds to ask again.
        """
        start = time.monotonic()
        run = self._load()
        macros: Any = self._templates.get_template("live_parts.html.jinja").module
        parts = {
            "state": macros.state(_summary(run)),
            "curves": self._draw(run, macros),
            "epochs": macros.epochs(_epoch_table(run)),
            "log": Markup.escape("\n".join(run.log_lines)),
        }
        drawing_sec = time.monotonic() - start
        refresh_sec = _REFRESH_SEC_AT_END if run.attempt and run.attempt.stop else _REFRESH_SEC
        return {
            "title": _title(run),
            "parts": {name: str(html) for name, html in parts.items()},
            "refresh_sec": round(max(refresh_sec, drawing_sec / _MOST_OF_A_CORE), 1),
        }

    def page(self) -> str:
        """Returns the whole page."""
        shown = self.update()
        parts = {name: Markup(html) for name, html in shown["parts"].items()}
        template = self._templates.get_template("live.html.jinja")
        return template.render(title=shown["title"], parts=parts, script=Markup(SCRIPT))

    def _load(self) -> LiveRun:
        path = find_newest_run(self._directories)
        if path != self._path:
            self._open(path)
        self._reader.update()
        return LiveRun.load(path, self._reader.points, self._reader.latest)

    def _open(self, path: pathlib.Path) -> None:
        """Begins to read a run."""
        self._path, self._reader = path, EventReader(path)
        self._drawn, self._figure = (-1, -1), Markup("")

    def _draw(self, run: LiveRun, macros: Any) -> Markup:
        """Returns the curves, drawn again where there are new values."""
        drawn = (run.points[-1].step if run.points else 0, len(run.history))
        if drawn != self._drawn:
            self._drawn, self._figure = drawn, macros.curves(_figure(run))
        return self._figure


def _shown(path: pathlib.Path) -> str:
    """Returns a path as text, whatever bytes it has."""
    return os.fspath(path).encode("utf-8", "replace").decode()


def _title(run: LiveRun) -> str:
    """Returns the title of the page, which is that of its tab: progress first."""
    mark, headline, _ = _state(run)
    is_running = run.attempt is not None and run.attempt.stop is None and mark != "bad"
    share = f"{run.step / run.num_steps:.0%}" if is_running and run.num_steps else ""
    return f"{share or headline.partition(':')[0]} · {_shown(run.path)}"


def _summary(run: LiveRun) -> dict[str, Any]:
    """Returns what stands on top of the page."""
    mark, headline, what_next = _state(run)
    return {
        "name": _shown(run.path),
        "setup": _setup(run),
        "caveats": _caveats(run),
        "mark": mark,
        "headline": headline,
        "what_next": what_next,
        "step": run.step,
        "num_steps": run.num_steps if run.attempt else None,
        "tiles": _tiles(run, mark),
    }


def _state(run: LiveRun) -> tuple[str, str, str]:
    """Returns a mark ("good", "bad", "differs", ""), a headline, and what to do about it."""
    if run.attempt is None:
        return _state_before_start(run)
    if run.attempt.stop is not None:
        return _state_at_end(run, run.attempt.stop)
    if not run.is_alive:
        return (
            "bad",
            f"Stopped without a last message, at step {_progress(run)}",
            "No process with the number in its log exists here: it was killed, or it runs on"
            " another machine or in a container. If it was killed, the same command resumes it"
            " from the last checkpoint.",
        )
    if not run.step:
        return "", "Compiling: the first step follows", ""
    epochs, steps_per_epoch = run.epochs or 0, run.steps_per_epoch or run.step or 1
    finished = len(run.history)
    verb = "Evaluating" if run.step >= (finished + 1) * steps_per_epoch else "Training"
    if finished and finished == epochs:
        verb = "Saving"
    epoch = min(finished + 1, epochs) if epochs else finished + 1
    of = f" of {epochs}" if epochs else ""
    return "", f"{verb}: epoch {epoch}{of}, step {_progress(run)}", ""


def _state_before_start(run: LiveRun) -> tuple[str, str, str]:
    command = run.config.get("command")
    if command in MEASURED:
        return "differs", f"No training: this is a run of {command}", "Only trainings are shown."
    if run.log_lines:
        return "", "Starting: the data are loaded and the model is built", ""
    return "", "No training here yet", "This page shows the training as soon as it has started."


def _state_at_end(run: LiveRun, stop: dict) -> tuple[str, str, str]:
    status, error = str(stop["status"]), str(stop.get("error", ""))
    if status == "finished":
        last = run.history[-1] if run.history else None
        result = f", test loss {last.test_loss:.4f}" if last else ""
        if last and last.test_accuracy is not None:
            result = f", test accuracy {last.test_accuracy:.4f}"
        return "good", f"Finished: {count(len(run.history), 'epoch')}{result}", ""
    verb = status.replace("_", " ").capitalize()
    headline = f"{verb} at step {_progress(run)}"
    if status in ("interrupted", "terminated"):
        return "differs", headline, "The same command resumes the training from this step."
    return "bad", headline, error


def _progress(run: LiveRun) -> str:
    return f"{run.step:,} of {run.num_steps:,}" if run.num_steps else f"{run.step:,}"


def _setup(run: LiveRun) -> str:
    """Returns in a line what is trained on what, as far as that is known."""
    config, recorded = run.config, run.recorded("config")
    devices = [str(device) for device in recorded.get("devices", [])]
    data = str(run.recorded("data").get("name", config.get("dataset", "")))
    model = config.get("case") or config.get("model")
    known = [
        f"{model} on {dataset_title(data)}" if model else "",
        str(config.get("strategy") or ""),
        devices_text(devices, bool(recorded.get("simulated_devices"))) if devices else "",
        f"recipe {config['recipe']}" if config.get("recipe") and not config.get("case") else "",
        f"batch {config['global_batch_size']}" if config.get("global_batch_size") else "",
    ]
    return ", ".join(each for each in known if each)


def _caveats(run: LiveRun) -> list[str]:
    """Returns what a reader must not miss."""
    fault, data = run.config.get("inject"), run.recorded("data").get("name")
    caveats = [injected_fault_caveat(str(fault))] if fault else []
    caveats += [DATASET_CAVEATS[data]] if data in DATASET_CAVEATS else []
    return caveats + [TIMING_CAVEAT] * bool(run.recorded("config").get("simulated_devices"))


def _noun(run: LiveRun) -> str:
    return "example" if run.config.get("case") else "image"


def _tiles(run: LiveRun, mark: str) -> list[_Tile]:
    """Returns the numbers on top of the page."""
    if run.attempt is None:
        return []
    values = run.latest.values if run.latest else {}
    tiles = [_Tile("loss", number(values.get("steps/loss"), ".4f"), "training, last steps")]
    if "steps/accuracy" in values:
        text = number(values["steps/accuracy"], ".4f")
        tiles.append(_Tile("accuracy", text, "training, last steps"))
    if run.history and run.history[-1].test_accuracy is not None:
        best = max(r.test_accuracy for r in run.history if r.test_accuracy is not None)
        text = number(run.history[-1].test_accuracy, ".4f")
        tiles.append(_Tile("test accuracy", text, f"best {best:.4f}"))
    speed = number(values.get("steps/images_per_sec"))
    tiles += [_Tile(f"{_noun(run)}s per second", speed, "last steps"), _verification_tile(run)]
    return tiles + _time_tiles(run, is_running=run.attempt.stop is None and mark != "bad")


def _verification_tile(run: LiveRun) -> _Tile:
    verified, wrong = run.verified_steps
    if not verified:
        return _Tile("verified steps", "0", "none so far")
    note = f"{wrong:,} mismatch{'es' * (wrong != 1)}"
    return _Tile("verified steps", whole(verified), note, "bad" if wrong else "good")


def _time_tiles(run: LiveRun, *, is_running: bool) -> list[_Tile]:
    stop, now = run.attempt.stop if run.attempt else None, time.time()
    if stop is not None:
        elapsed = stop.get("elapsed_sec")
        known = isinstance(elapsed, int | float)
        return [_Tile("time", _duration(elapsed) if known else "–", "of the last attempt")]
    tiles = []
    if run.started is not None and is_running:
        last = f"last step {_duration(now - run.latest.time)} ago" if run.latest else ""
        tiles.append(_Tile("time", _duration(now - run.started), last))
    if run.remaining_sec is not None and is_running:
        end = time.localtime(now + min(run.remaining_sec, 1e9))
        form = "%H:%M" if run.remaining_sec < 86_400 / 2 else "%Y-%m-%d %H:%M"
        until = f"expected end {time.strftime(form, end)}"
        tiles.append(_Tile("time left", f"≈ {_duration(run.remaining_sec)}", until))
    return tiles


def _duration(seconds: float) -> str:
    """Returns "45 s", "12 min", "3 h 05 min" or "2 d 4 h"."""
    whole_sec = max(0, round(min(seconds, 1e12))) if seconds == seconds else 0
    minutes, hours = whole_sec // 60, whole_sec // 3600
    if whole_sec < 100:
        return f"{whole_sec} s"
    if minutes < 100:
        return f"{minutes} min"
    if hours < 48:
        return f"{hours} h {minutes % 60:02} min"
    return f"{hours // 24:,} d {hours % 24} h"


def _figure(run: LiveRun) -> Figure | None:
    """Returns the curves, None while there is nothing to draw."""
    charts = []
    for title, tag, field, form, most in _CHARTS:
        training = [(p.step, p.values[tag]) for p in run.points if tag in p.values]
        test = [(r.step, getattr(r, field)) for r in run.history if field]
        test = [(step, value) for step, value in test if value is not None]
        if not training and not test:
            continue
        largest = max((value for _, value in training if is_finite(value)), default=0.0)
        charts.append(
            line_chart(
                title.format(_noun(run)),
                {"training": training, **({"test": test} if test else {})},
                x_label="step",
                form=form,
                most=most,
                least_span=0.1 if field else 0.5 * largest,
                looks=(_TRAINING, _TEST),
            )
        )
    if not charts:
        return None
    legend = [(_TRAINING, "training"), (_TEST, "test, after each epoch")]
    return Figure("Over the steps", charts, legend[: 2 if run.history else 1], [])


def _epoch_table(run: LiveRun) -> Table | None:
    """Returns the finished epochs, the newest first; None before the first."""
    if not run.history:
        return None
    shown = {
        field: column for field, column in _COLUMNS.items()
        if any(getattr(record, field) is not None for record in run.history)
    }  # fmt: skip
    rows = [
        [str(record.epoch), *(number(getattr(record, f), form) for f, (_, form) in shown.items())]
        for record in reversed(run.history[-_MOST_EPOCHS:])
    ]
    header = ["epoch", *(name.format(_noun(run)) for name, _ in shown.values())]
    more = f" (last {_MOST_EPOCHS} of {len(run.history)})" * (len(run.history) > _MOST_EPOCHS)
    return Table(f"Finished epochs, newest first{more}", header, "r" * len(header), rows)
