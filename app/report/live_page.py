"""Builds the page of a training in progress, as HTML parts that are replaced."""

import base64
import hashlib
import pathlib
import time
from collections.abc import Sequence
from typing import Any

from markupsafe import Markup

from app.records.event_reader import EventReader
from app.report.charts import Figure, Look, line_chart
from app.report.live_run import LiveRun, find_newest_run
from app.report.live_summary import noun, summary, title
from app.report.page_parts import Table, is_finite, number
from app.report.templates import create_environment

SCRIPT = (pathlib.Path(__file__).parent / "live.js").read_text(encoding="utf-8")
_SCRIPT_SHA256 = base64.b64encode(hashlib.sha256(SCRIPT.encode()).digest()).decode()
# The charts need inline styles; the only script allowed is the page's own.
SECURITY_POLICY = (
    f"default-src 'none'; script-src 'sha256-{_SCRIPT_SHA256}'; style-src 'unsafe-inline';"
    " connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none';"
    " frame-ancestors 'none'"
)
_REFRESH_SEC, _REFRESH_SEC_AT_END = 2, 10
_MOST_OF_A_CORE = 0.05  # Maximum fraction of a core for drawing.
_MOST_EPOCHS = 50
_TRAINING, _TEST = Look(0, 0, 1.8), Look(1, 1, 1.7)
# Title, tag of the training's values, field of the test's values, format, largest value.
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


class LivePage:
    """The page of the newest training in some directories.

    Args:
        directories: directories of trainings or comparisons, or parents of them; need not exist
            yet.
    """

    def __init__(self, directories: Sequence[pathlib.Path]) -> None:
        self._directories, self._templates = directories, create_environment()
        self._open(directories[0])

    def update(self) -> dict[str, Any]:
        """Reads new records, and returns the current contents of the page.

        Returns:
            The page's "title", its "parts" as id → HTML, and the seconds until the next request.
        """
        start = time.thread_time()
        run = self._load()
        macros: Any = self._templates.get_template("live_parts.html.jinja").module
        parts = {
            "state": macros.state(summary(run)),
            "curves": self._draw(run, macros),
            "epochs": macros.epochs(_epoch_table(run)),
            "log": Markup.escape("\n".join(run.log_lines)),
        }
        cpu_sec = time.thread_time() - start
        refresh_sec = _REFRESH_SEC_AT_END if run.attempt and run.attempt.stop else _REFRESH_SEC
        return {
            "title": title(run),
            "parts": {name: str(html) for name, html in parts.items()},
            "refresh_sec": round(max(refresh_sec, cpu_sec / _MOST_OF_A_CORE), 1),
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
        """Starts to read a run."""
        self._path, self._reader = path, EventReader(path)
        self._drawn, self._figure = (-1, -1), Markup("")

    def _draw(self, run: LiveRun, macros: Any) -> Markup:
        """Returns the curves, redrawn if there are new values."""
        drawn = (run.points[-1].step if run.points else 0, len(run.history))
        if drawn != self._drawn:
            self._drawn, self._figure = drawn, macros.curves(_figure(run))
        return self._figure


def _figure(run: LiveRun) -> Figure | None:
    """Returns the curves; None if there is nothing to draw yet."""
    charts = []
    for name, tag, field, form, most in _CHARTS:
        training = [(p.step, p.values[tag]) for p in run.points if tag in p.values]
        test = [(r.step, getattr(r, field)) for r in run.history if field]
        test = [(step, value) for step, value in test if value is not None]
        if not training and not test:
            continue
        largest = max((value for _, value in training if is_finite(value)), default=0.0)
        charts.append(
            line_chart(
                name.format(noun(run)),
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
    """Returns the finished epochs, newest first; None before the first."""
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
    header = ["epoch", *(name.format(noun(run)) for name, _ in shown.values())]
    more = f" (last {_MOST_EPOCHS} of {len(run.history)})" * (len(run.history) > _MOST_EPOCHS)
    return Table(f"Finished epochs, newest first{more}", header, "r" * len(header), rows)
