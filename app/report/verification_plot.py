"""Draws the figure of `verify` from `verify.json`."""

import pathlib
import textwrap

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from app.records.caveats import dataset_title
from app.records.files import read_json
from app.records.pair_outcomes import outcome_sentences, verdict_sentence
from app.report.plot_style import save_figure
from app.report.tolerance_shares import (
    FLOOR,
    MISMATCH_PANELS,
    PANELS,
    distinct_trainings,
    is_mismatch,
    shares,
)

_TITLE_COLUMNS, _NOTE_COLUMNS = 110, 140
_RIGHT, _WRONG, _BAND = "#0072B2", "#D55E00", "#009E73"


def plot_verification(path: pathlib.Path) -> None:
    """Draws `verify.png` and `verify.svg` into the directory that holds `verify.json`."""
    record = read_json(path / "verify.json")
    figure = _draw(record)
    save_figure(figure, path, "verify")


def _draw(record: dict) -> Figure:
    strategies = record["strategies"]
    lines = [shares(run["measurements"]) for run in strategies.values()]
    kinds = [kind for kind in PANELS if any(k == kind for each in lines for k, *_ in each)]
    kinds += [
        kind for kind in MISMATCH_PANELS
        if any(key[0] == kind and is_mismatch(each[key]) for each in lines for key in each)
    ]  # fmt: skip
    rows = distinct_trainings(strategies)
    size = 2.6 * len(kinds) + 0.8, 2.3 * len(rows) + 1.5
    figure = Figure(figsize=size, layout="constrained")
    panels = figure.subplots(len(rows), len(kinds), sharex=True, sharey=True, squeeze=False)
    for row, (names, measured) in zip(panels, rows, strict=True):
        for axes, kind in zip(row, kinds, strict=True):
            _draw_panel(axes, measured, kind, record["steps"])
        row[0].set_ylabel(f"{' = '.join(names)}\nerror / allowed")
    drawn = [share for axes in panels.flat for line in axes.lines for share in line.get_ydata()]
    panels[0, 0].set_ylim(FLOOR / 2, max(10, 5 * max(drawn)))  # All panels share the y axis.
    for axes, kind in zip(panels[0], kinds, strict=True):
        axes.set_title({**PANELS, **MISMATCH_PANELS}[kind], fontsize=9)
    for axes in panels[-1]:
        axes.set_xlabel("step")
    figure.suptitle(
        "\n".join(_title(record)), fontsize=11, weight="bold", ha="left", x=0.01, linespacing=1.4
    )
    notes = "\n".join(_notes(record))
    figure.supxlabel(notes, fontsize=9, color="0.25", ha="left", x=0.01, linespacing=1.4)
    return figure


def _draw_panel(axes: Axes, measured: dict, kind: str, num_steps: int) -> None:
    """Draws a line for each tensor and replica; the band is the computed tolerance."""
    lines = [points for (k, *_), points in shares(measured).items() if k == kind]
    axes.axhspan(FLOOR / 10, 1, color=_BAND, alpha=0.13, linewidth=0)
    for points in lines:
        wrong = is_mismatch(points)
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
    first = 0 if any(step == 0 for points in lines for step, _ in points) else 1
    axes.set_xlim(first - 0.5, num_steps + 0.5)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    axes.grid(True, color="0.9", linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)


def _title(record: dict) -> list[str]:
    """Returns the injected fault, the verdict and the findings."""
    lines = [f"INJECTED FAULT: {record['injected_fault']}"] if record["injected_fault"] else []
    lines.append(verdict_sentence(record))
    for name, run in record["strategies"].items():
        for finding in run["findings"]:
            text = f"{name}: {finding['where']}: {finding['text']}"
            lines += textwrap.wrap(text, _TITLE_COLUMNS)
    return lines


def _notes(record: dict) -> list[str]:
    """Returns the outcome of each pair, the setup, and how to read the figure."""
    outcomes = [(tuple(pair["strategies"]), pair["outcome"]) for pair in record["pairs"]]
    num_devices = max(len(run["devices"]) for run in record["strategies"].values())
    setup = (
        f"{record['model']} on {dataset_title(record['dataset'])}, recipe {record['recipe']}, batch"
        f" {record['global_batch_size']}, {num_devices} device{'s' * (num_devices > 1)},"
        f" {record['precision']}; each step is compared with one device in float64."
    )
    legend = (
        "A line for each tensor and replica, values below 1e-4 on the lower edge. Green: what"
        " rounding allows; a sum of two gradients is expected at its upper edge, as it has one"
        " rounding and one is allowed."
    )
    pairs = "; ".join(outcome_sentences(outcomes))
    return [line for text in (pairs, setup, legend) for line in textwrap.wrap(text, _NOTE_COLUMNS)]
