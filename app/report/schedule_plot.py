"""Draws the figure of a pipeline's schedule from `explain.json`."""

import pathlib
from collections.abc import Sequence

from matplotlib.figure import Figure

from app.records.files import read_json
from app.report.plot_style import save_figure
from app.report.schedule_chart import Pass, draw_passes, passes_in_slots, passes_in_time

_NAME = "schedule"
_COLOURS = "#0072B2", "#E69F00"  # Forward, backward.


def plot_schedule(path: pathlib.Path, out_dir: pathlib.Path) -> list[str]:
    """Draws the schedule, and its measured timing, into `schedule.png` and `schedule.svg`.

    Args:
        path: `explain.json` of a pipeline.
        out_dir: output directory.

    Returns:
        The names of the files.
    """
    record = read_json(path)
    save_figure(_draw(record), out_dir, _NAME)
    return [f"{_NAME}.png", f"{_NAME}.svg"]


def _draw(record: dict) -> Figure:
    pipeline = record["split"]["pipeline"]
    num_stages, number = len(pipeline["stages"]), pipeline["num_micro_batches"]
    panels: list[tuple[str, Sequence[Pass], str]] = [
        (
            f"by the schedule, every task one slot: idle {pipeline['bubble']:.1%}",
            passes_in_slots(pipeline["slots"]),
            "time slot",
        )
    ]
    for key, how in (("padded", "measured, stages padded alike"), ("measured", "measured")):
        if timed := pipeline[key]:
            passes = passes_in_time(timed["tasks"])
            panels.append((f"{how}: idle {_idle(timed):.1%}", passes, "milliseconds"))
    figure = Figure(
        figsize=(10, 1.1 + len(panels) * (0.85 + 0.42 * num_stages)), layout="constrained"
    )
    rows = figure.subplots(len(panels), 1, squeeze=False)[:, 0]
    for axes, (title, drawn, unit) in zip(rows, panels, strict=True):
        draw_passes(axes, drawn, num_stages, colours=_COLOURS, texts=("white", "black"))
        axes.set_title(title, fontsize=10, loc="left")
        axes.set_xlabel(unit, fontsize=9)
    config = record["config"]
    figure.suptitle(
        f"{config['model']} in {num_stages} stages, {number} micro-batches, schedule"
        f" {pipeline['schedule']}: forward (blue) and backward (orange) passes",
        fontsize=11,
        ha="left",
        x=0.02,
    )
    return figure


def _idle(timed: dict) -> float:
    return sorted(timed["idle_shares"])[len(timed["idle_shares"]) // 2]
