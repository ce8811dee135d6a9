"""Draws the figure of one-epoch runs: loss and accuracy over steps instead of epochs."""

import math
from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from app.records.event_reader import StepScalars, middle_steps
from app.records.history import EpochRecord, Summary
from app.report.plot_style import LOOKS, Look, label_axes, scale_accuracy, set_title

_TRAIN, _TEST = Look("#D55E00", "-", "", 1.8), Look("#0072B2", "", "o", 4.0)


def draw_one_epoch(
    runs: Sequence[tuple[Summary, Sequence[EpochRecord]]], steps: Sequence[list[StepScalars]]
) -> Figure:
    """Draws the training loss over steps, and beside it accuracies.

    Of one run, its training accuracy over steps and its test accuracy at the last step; of several
    runs or of a case, a point for the result of each.

    Args:
        runs: of one epoch each.
        steps: of each run, from `load_steps`.
    """
    figure = Figure(figsize=(10, 4.6), layout="constrained")
    left, right = figure.subplots(1, 2)
    names = [summary.strategy for summary, _ in runs]
    looks = [LOOKS[i % len(LOOKS)] for i in range(len(runs))] if len(runs) > 1 else [_TRAIN]
    for look, name, points in zip(looks, names, steps, strict=True):
        _draw_curve(left, points, "steps/loss", look, name)
    label_axes(left, "step", "training loss")
    left.set_ylim(bottom=0)
    if len(runs) > 1:
        left.legend()
    summary, history = runs[0]
    if len(runs) > 1 or summary.case:
        _draw_results(right, runs, looks)
    else:
        _draw_curve(right, steps[0], "steps/accuracy", _TRAIN, "train")
        accuracy = history[-1].test_accuracy
        right.plot(
            history[-1].step,
            accuracy,
            _TEST.marker,
            color=_TEST.colour,
            markersize=2 * _TEST.width,
            label=f"test after the epoch: {accuracy:.1%}",
        )
        label_axes(right, "step", "accuracy")
        scale_accuracy(right)
        right.legend(loc="lower right")
    set_title(figure, [summary for summary, _ in runs])
    return figure


def _draw_curve(axes: Axes, points: list[StepScalars], tag: str, look: Look, name: str) -> None:
    """Draws the means over the steps of each compiled call, at the middle of these steps."""
    axes.plot(
        middle_steps(points),
        [point.values.get(tag, math.nan) for point in points],
        look.line,
        color=look.colour,
        linewidth=look.width,
        label=name,
    )


def _draw_results(
    axes: Axes, runs: Sequence[tuple[Summary, Sequence[EpochRecord]]], looks: Sequence[Look]
) -> None:
    """Draws a labelled point for the result of each run, one below the other."""
    first, is_accuracy = runs[0][0], not runs[0][0].case
    data = "training data" if first.evaluates_training_data else "test"
    metric = next(iter(first.test_metrics), "loss")
    for row, (look, (_, history)) in enumerate(zip(looks, runs, strict=True)):
        record = history[-1]
        value = record.test_accuracy if is_accuracy else record.test_metrics.get(metric)
        value = record.test_loss if value is None else value
        axes.plot(value, row, look.marker or "o", color=look.colour, markersize=9)
        text = f"{value:.2%}" if is_accuracy else f"{value:.4g}"
        axes.annotate(text, (value, row), (0, 9), textcoords="offset points", ha="center")
    label_axes(axes, "test accuracy" if is_accuracy else f"{data} {metric}", "")
    axes.set_yticks(range(len(runs)), [summary.strategy for summary, _ in runs])
    axes.set_ylim(len(runs) - 0.5, -0.7)
    if is_accuracy:
        low, high = axes.get_xlim()
        axes.set_xlim(max(0.0, low - 0.05), min(1.0, high + 0.05))
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
