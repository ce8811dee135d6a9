"""Draws the accuracy figure of one or several runs from the records on disk."""

import dataclasses
import itertools
import math
import pathlib
from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from app.records.event_reader import load_steps
from app.records.history import (
    EpochRecord,
    Summary,
    load_history,
    load_required_summary,
)
from app.report.one_epoch_plot import draw_one_epoch
from app.report.plot_style import (
    LOOKS,
    Look,
    finish_axes,
    save_figure,
    scale_accuracy,
    set_title,
)

Run = tuple[Summary, Sequence[EpochRecord]]


def plot_accuracy(run_dirs: Sequence[pathlib.Path], out_dir: pathlib.Path) -> None:
    """Draws accuracy over epochs into `accuracy.png` and `accuracy.svg`; writes each atomically.

    For one run, test and train accuracy share a panel. For several, there is a panel each for test
    and train accuracy, with one curve per run. For a case, draws the losses and its first metric.
    Runs of one epoch are drawn over their steps, if recorded.

    Args:
        run_dirs: run directories with at least one finished epoch each.
        out_dir: output directory.
    """
    runs = [(load_required_summary(path), load_history(path)) for path in run_dirs]
    steps = [load_steps(path) for path in run_dirs] if runs[0][0].epochs == 1 else []
    if steps and all(steps):
        figure = draw_one_epoch(runs, steps)
    elif runs[0][0].case:
        figure = _draw_case(runs)
    else:
        figure = _draw_one(*runs[0]) if len(runs) == 1 else _draw_several(runs)
    save_figure(figure, out_dir, "accuracy")


def _draw_one(summary: Summary, history: Sequence[EpochRecord]) -> Figure:
    figure = Figure(figsize=(7, 4.6), layout="constrained")
    axes = figure.subplots()
    test = Look("#0072B2", "-", "o", 2.0)
    train = Look("#D55E00", "--", "s", 1.5)
    _draw_curve(axes, history, "train_accuracy", train, "train")
    _draw_curve(axes, history, "test_accuracy", test, "test")
    finish_axes(axes, summary.epochs, "accuracy")
    scale_accuracy(axes)
    handles, labels = axes.get_legend_handles_labels()
    axes.legend(handles[::-1], labels[::-1], loc="lower right")
    set_title(figure, [summary])
    return figure


def _draw_case(runs: Sequence[Run]) -> Figure:
    """Draws the losses of a case and its first metric: one curve per run."""
    summary = runs[0][0]
    data = "training data" if summary.evaluates_training_data else "test"
    fields = {"test_loss": f"{data} loss after the epoch", "train_loss": "loss in the epoch"}
    fields |= {name: f"{data} {name}" for name in list(summary.test_metrics)[:1]}
    figure = Figure(figsize=(5 * len(fields), 4.8), layout="constrained")
    panels = figure.subplots(1, len(fields))
    for axes, (field, title) in zip(panels, fields.items(), strict=True):
        for look, (each, history) in zip(itertools.cycle(LOOKS), runs, strict=False):
            _draw_curve(axes, history, field, look, each.strategy, form=".4g")
        finish_axes(axes, summary.epochs, title)
        axes.legend()
    set_title(figure, [summary for summary, _ in runs])
    return figure


def _draw_several(runs: Sequence[Run]) -> Figure:
    figure = Figure(figsize=(10, 4.8), layout="constrained")
    panels = figure.subplots(1, 2, sharey=True)
    for axes, field, name in zip(
        panels,
        ("test_accuracy", "train_accuracy"),
        ("test accuracy", "train accuracy"),
        strict=True,
    ):
        for look, (summary, history) in zip(itertools.cycle(LOOKS), runs, strict=False):
            _draw_curve(axes, history, field, look, summary.strategy)
        finish_axes(axes, runs[0][0].epochs, name)
        scale_accuracy(axes)
    panels[0].legend(loc="lower right")
    set_title(figure, [summary for summary, _ in runs])
    return figure


def _draw_curve(
    axes: Axes,
    history: Sequence[EpochRecord],
    field: str,
    look: Look,
    name: str,
    form: str = ".1%",
) -> None:
    """Draws one curve of a field or a metric, with its last value in the legend."""
    values = [{**r.test_metrics, **dataclasses.asdict(r)}.get(field, math.nan) for r in history]
    axes.plot(
        [record.epoch for record in history],
        values,
        look.line,
        color=look.colour,
        linewidth=look.width,
        marker=look.marker,
        markersize=3 + look.width,
        markerfacecolor="white" if look.line != "-" else look.colour,
        label=f"{name}: {values[-1]:{form}}",
    )
