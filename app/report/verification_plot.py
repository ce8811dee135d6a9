"""Draws the figure of `verify` from `verify.json`."""

import itertools
import math
import pathlib
import textwrap
from collections.abc import Iterable

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from app.records.files import read_json
from app.report.plot_style import STYLE, save_figure
from app.report.result import Facts, Result, Table

_PANELS = {
    "loss": "loss of each replica",
    "gradients": "gradients before the all-reduce",
    "sums": "gradients after the all-reduce",
    "weights": "weights, given these sums",
    "own statistics": "BatchNorm statistics",
}
# Drawn only if they have a mismatch.
_MISMATCH_PANELS = {
    "examples": "examples",
    "slots": "optimizer state",
    "agreement": "replicas against replica 0",
    "statistics": "BatchNorm statistics, averaged",
}
_FLOOR, _CEILING = 1e-4, 1e8  # Fractions of the tolerance are drawn within these.
_RIGHT, _WRONG, _BAND = "#0072B2", "#D55E00", "#009E73"

Lines = dict[tuple, list[tuple[int, float]]]  # Kind, tensor, replica → step, error / tolerance.


def plot_verification(path: pathlib.Path) -> None:
    """Draws `verify.png` and `verify.svg` into the directory that holds `verify.json`."""
    save_figure(_draw(read_json(path / "verify.json", max_bytes=1 << 30)), path, "verify")


@matplotlib.rc_context(STYLE)
def _draw(record: dict) -> Figure:
    rows: list[tuple[list[str], dict, Lines]] = []  # Once for bitwise identical trainings.
    for name, run in record["strategies"].items():
        same = next((names for names, other, _ in rows if other == run["measurements"]), None)
        if same:
            same.append(name)
        elif run["measurements"]:
            rows.append(([name], run["measurements"], _lines(run["measurements"])))
    worst: dict[str, float] = {}
    for _, _, lines in rows:
        for (kind, *_), points in lines.items():
            worst[kind] = max(worst.get(kind, 0.0), *(share for _, share in points))
    kinds = {kind: title for kind, title in _PANELS.items() if kind in worst}
    kinds |= {k: title for k, title in _MISMATCH_PANELS.items() if worst.get(k, 0) > 1}
    size = 2.6 * len(kinds) + 0.8, 2.3 * len(rows) + 1.5
    figure = Figure(figsize=size, layout="constrained")
    panels = figure.subplots(len(rows), len(kinds), sharex=True, sharey=True, squeeze=False)
    for row, (names, _, lines) in zip(panels, rows, strict=True):
        for axes, kind in zip(row, kinds, strict=True):
            drawn = [points for (k, *_), points in lines.items() if k == kind]
            _draw_panel(axes, drawn, record["steps"])
        row[0].set_ylabel(f"{' = '.join(names)}\nerror / allowed")
    panels[0, 0].set_ylim(_FLOOR / 2, max(10, 5 * max(worst.values())))  # Shared by all panels.
    for axes, title in zip(panels[0], kinds.values(), strict=True):
        axes.set_title(title, fontsize=9)
    for axes in panels[-1]:
        axes.set_xlabel("step")
    result = Result.from_record(record["shown"])
    figure.suptitle(_title(result))
    figure.supxlabel(_notes(result), fontsize=9, color="0.25", ha="left", x=0.01, linespacing=1.4)
    return figure


def _lines(measured: dict) -> Lines:
    """Returns errors as fractions of their tolerances.

    A value that is bitwise identical to the float32 reference is correct, whatever its distance to
    float64.
    """
    lines: Lines = {}
    columns = ("step", "kind", "tensor", "replica_id", "error", "limit", "absolute32")
    for step, kind, tensor, replica, error, limit, absolute32 in zip(
        *(measured.get(column, ()) for column in columns), strict=True
    ):
        share = error / limit if limit else (math.inf if error else 0.0)
        share = share if math.isfinite(share) else _CEILING
        if absolute32 == 0:
            share = min(share, 1.0)
        if step or share > 1:
            point = (step, min(max(share, _FLOOR), _CEILING))
            lines.setdefault((kind, tensor, replica), []).append(point)
    return lines


def _draw_panel(axes: Axes, lines: list[list[tuple[int, float]]], num_steps: int) -> None:
    """Draws a line for each tensor and replica; the band is the computed tolerance."""
    axes.axhspan(_FLOOR / 10, 1, color=_BAND, alpha=0.13, linewidth=0)
    for points in lines:
        wrong = any(share > 1 for _, share in points)
        axes.plot(
            *zip(*points, strict=True),
            color=_WRONG if wrong else _RIGHT,
            alpha=0.9 if wrong else max(0.12, min(0.8, 6 / len(lines))),
            linewidth=1.6 if wrong else 1.0,
            marker="o" if num_steps < 8 or wrong else "",
            markersize=3,
        )
    axes.axhline(1, color=_BAND, linewidth=1.2)
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter(lambda share, _: f"{share:g}")
    first = 0 if any(step == 0 for points in lines for step, _ in points) else 1
    axes.set_xlim(first - 0.5, num_steps + 0.5)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    axes.grid()


def _title(result: Result) -> str:
    """Returns the caveats, the verdict and the findings."""
    lines = [*result.caveats, *(sentence for _, sentence in result.verdicts)]
    for block in result.blocks:
        if isinstance(block, Facts):
            lines.append(f"{block.title}, {': '.join(block.facts.values())}")
    return _wrapped(lines, 110)


def _notes(result: Result) -> str:
    """Returns the lines above the first table, and how to read the figure."""
    above = itertools.takewhile(lambda block: not isinstance(block, Table), result.blocks)
    legend = (
        "A line for each tensor and replica, values below 1e-4 on the lower edge. Green: what"
        " rounding allows; a sum of two gradients is expected at its upper edge, as it has one"
        " rounding and one is allowed. Each step is compared with one device in float64."
    )
    return _wrapped([*(block for block in above if isinstance(block, str)), legend], 140)


def _wrapped(texts: Iterable[str], columns: int) -> str:
    return "\n".join(line for text in texts for line in textwrap.wrap(text, columns))
