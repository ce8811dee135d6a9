"""Draws the figure of `verify` from `verify.json`."""

import math
import pathlib
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from app.records.files import read_json
from app.report.plot_style import STYLE, save_figure
from app.report.result import Facts, Result

_PANELS = {
    "forward": "forward: predictions",
    "loss": "loss of each shard",
    "gradients": "gradients of each replica",
    "all-reduce": "all-reduce: their sum",
    "update": "update: weights, given the sum",
    "statistics": "statistics of BatchNorm",
}
_FLOOR, _CEILING = 1e-4, 1e8  # Fractions of the tolerance are drawn within these.
_RIGHT, _WRONG, _BAND = "#0072B2", "#D55E00", "#009E73"

Lines = dict[tuple, list[tuple[int, float]]]  # Stage, tensor, item → step, distance / allowed.


def plot_verification(path: pathlib.Path) -> None:
    """Draws `verify.png` and `verify.svg` into the directory that holds `verify.json`."""
    save_figure(_draw(read_json(path / "verify.json", max_bytes=1 << 30)), path, "verify")


@matplotlib.rc_context(STYLE)
def _draw(record: Mapping[str, Any]) -> Figure:
    rows: list[tuple[list[str], Mapping, Lines]] = []  # Once for bitwise identical trainings.
    for name, run in record["trainings"].items():
        measured = run["measurements"]
        same = next((names for names, other, _ in rows if other == measured), None)
        if same:
            same.append(name)
        elif measured["step"]:
            rows.append(([name], measured, _lines(measured)))
    worst: dict[str, float] = {}
    for _, _, lines in rows:
        for (stage, *_), points in lines.items():
            worst[stage] = max(worst.get(stage, 0.0), *(share for _, share in points))
    stages = {stage: title for stage, title in _PANELS.items() if stage in worst}
    stages |= {stage: stage for stage, share in worst.items() if stage not in stages and share > 1}
    stages = stages or {stage: stage for stage in worst}
    size = 2.6 * len(stages) + 0.8, 2.3 * len(rows) + 1.5
    figure = Figure(figsize=size, layout="constrained")
    panels = figure.subplots(len(rows), len(stages), sharex=True, sharey=True, squeeze=False)
    for row, (names, _, lines) in zip(panels, rows, strict=True):
        for axes, stage in zip(row, stages, strict=True):
            _draw_panel(axes, [points for (s, *_), points in lines.items() if s == stage])
        row[0].set_ylabel(f"{_plain(' = '.join(names))}\ndifference / allowed")
    panels[0, 0].set_ylim(_FLOOR / 2, max(10, 5 * max(worst.values())))  # Shared by all panels.
    for axes, title in zip(panels[0], stages.values(), strict=True):
        axes.set_title(title, fontsize=9)
    steps = max((run["steps"] for run in record["trainings"].values()), key=len)
    for axes in panels[-1]:
        axes.set_xlabel("step")
        axes.xaxis.set_major_formatter(lambda position, _: _tick(steps, position))
    result = Result.from_record(record["shown"])
    figure.suptitle(_title(result))
    figure.supxlabel(_notes(result), fontsize=9, color="0.25", ha="left", x=0.01, linespacing=1.4)
    return figure


def _lines(measured: Mapping[str, list]) -> Lines:
    """Returns differences as fractions of what rounding allows; 0 for bitwise equal arrays."""
    lines: Lines = {}
    columns = ("step", "stage", "tensor", "item", "distance", "allowed", "same_bits")
    for step, stage, tensor, item, distance, allowed, same in zip(
        *(measured[column] for column in columns), strict=True
    ):
        share = 0.0
        if not same and distance != 0:
            share = distance / allowed if allowed and distance is not None else math.inf
        point = (step, min(max(share, _FLOOR), _CEILING))
        lines.setdefault((stage, tensor, item), []).append(point)
    return lines


def _tick(steps: Sequence[str], position: float) -> str:
    """Returns the number of a step; "" for a step with another name."""
    name = steps[int(position)] if 0 <= position < len(steps) else ""
    return name.removeprefix("step ") if name.startswith("step ") else ""


def _draw_panel(axes: Axes, lines: list[list[tuple[int, float]]]) -> None:
    """Draws a line for each tensor and item; the band is the computed tolerance."""
    axes.axhspan(_FLOOR / 10, 1, color=_BAND, alpha=0.13, linewidth=0)
    for points in lines:
        wrong = any(share > 1 for _, share in points)
        axes.plot(
            *zip(*points, strict=True),
            color=_WRONG if wrong else _RIGHT,
            alpha=0.9 if wrong else max(0.12, min(0.8, 6 / len(lines))),
            linewidth=1.6 if wrong else 1.0,
            marker="o" if len(points) < 8 or wrong else "",
            markersize=3,
        )
    axes.axhline(1, color=_BAND, linewidth=1.2)
    axes.set_yscale("log")
    axes.minorticks_off()  # They take half of the time of a figure.
    axes.yaxis.set_major_formatter(lambda share, _: f"{share:g}")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    axes.margins(x=0.05)
    axes.grid()


def _title(result: Result) -> str:
    """Returns the caveats and the verdicts."""
    return _wrapped([*result.caveats, *(sentence for _, sentence in result.verdicts)], 110)


def _notes(result: Result) -> str:
    """Returns the findings, the set-up and how to read the figure."""
    facts = [block for block in result.blocks if isinstance(block, Facts)]
    findings = [f"{block.title}: {block.facts['why']}" for block in facts if block.title]
    (setup,) = (block.facts for block in facts if not block.title)
    legend = (
        "A line for each tensor and replica, values below 1e-4 on the lower edge. Green: what"
        " rounding allows. Each step starts from the recorded state."
    )
    about = [f"{name}: {text}" for name, text in setup.items()]
    return _wrapped([*findings, *about, legend], 140)


def _wrapped(texts: Iterable[str], columns: int) -> str:
    lines = (line for text in texts for line in textwrap.wrap(text, columns))
    return "\n".join(map(_plain, lines))


def _plain(text: str) -> str:
    """Returns text in which matplotlib finds no formula."""
    return text.replace("$", r"\$")
