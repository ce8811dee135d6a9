"""Draws the accuracy of one or several runs over the epochs."""

import pathlib
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter

from app.records.caveats import TIMING_CAVEAT, dataset_title
from app.records.history import EpochRecord, Summary
from app.report.plot_style import LOOKS, STYLE, Look, save_figure, set_title
from app.report.training_result import devices_text

_TRAIN, _TEST = Look("#D55E00", "--", "s", 1.5), Look("#0072B2", "-", "o", 2.0)

Run = tuple[Summary, Sequence[EpochRecord]]


class _Curve(NamedTuple):
    name: str
    look: Look
    values: list[float]


def plot_accuracy(runs: Mapping[str, Run], out_dir: pathlib.Path) -> None:
    """Draws accuracy over epochs into `accuracy.png` and `accuracy.svg`; writes each atomically.

    Args:
        runs: see `draw_accuracy`.
        out_dir: output directory.
    """
    save_figure(draw_accuracy(runs), out_dir, "accuracy")


@matplotlib.rc_context(STYLE)
def draw_accuracy(runs: Mapping[str, Run]) -> Figure:
    """Draws the accuracies of runs.

    For one run, test and train accuracy share a panel. For several, there is a panel each for test
    and train accuracy, with one curve per run. Accuracies after one epoch are drawn as bars.

    Args:
        runs: name → summary and history of at least one epoch.
    """
    panels: dict[str, list[_Curve]] = {}
    for field, look in (("test", _TEST), ("train", _TRAIN)):
        for index, (name, (_, history)) in enumerate(runs.items()):
            values = [getattr(record, f"{field}_accuracy") for record in history]
            if len(runs) == 1:
                name = "test" if field == "test" else "train, mean of an epoch"
                panels.setdefault("accuracy", []).append(_Curve(name, look, values))
            else:
                look = LOOKS[index % len(LOOKS)]
                panels.setdefault(f"{field} accuracy", []).append(_Curve(name, look, values))
    one_epoch = all(len(history) == 1 for _, history in runs.values())
    height = 1.8 + 0.4 * max(2, len(runs)) if one_epoch else 4.8
    figure = Figure(figsize=(7 if len(runs) == 1 else 10, height))
    figure.set_layout_engine("constrained", wspace=0.08)  # Between "100%" and "0%".
    all_axes = figure.subplots(1, len(panels), sharex=True, sharey=True, squeeze=False)[0]
    for axes, (title, curves) in zip(all_axes, panels.items(), strict=True):
        if one_epoch:
            _draw_bars(axes, title, curves)
        else:
            _draw_curves(axes, title, curves)
    if not one_epoch:
        _scale(all_axes[0], max(summary.epochs for summary, _ in runs.values()))
    set_title(figure, _title([summary for summary, _ in runs.values()]))
    return figure


def _draw_bars(axes: Axes, title: str, curves: Sequence[_Curve]) -> None:
    """Draws a bar for the accuracy of each run after its only epoch."""
    for row, (_, look, (value,)) in enumerate(curves):
        axes.barh(row, value, 0.6, color=look.colour, alpha=0.35)
        axes.text(0.01, row, f"{value:.1%}", va="center", weight="bold")
    axes.set_yticks(range(len(curves)), [curve.name for curve in curves])
    axes.set_ylim(len(curves) - 0.5, -0.5)
    axes.set_xlim(0, 1)
    axes.set_xlabel(f"{title} after one epoch")
    axes.xaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))


def _draw_curves(axes: Axes, title: str, curves: Sequence[_Curve]) -> None:
    """Draws a curve for each run, with its last value in the legend."""
    for name, look, values in curves:
        axes.plot(
            range(1, len(values) + 1),
            values,
            look.line,
            color=look.colour,
            linewidth=look.width,
            marker=look.marker,
            markersize=3 + look.width,
            markerfacecolor="white" if look.line != "-" else look.colour,
            label=f"{name}: {values[-1]:.1%}",
        )
    axes.legend()
    axes.set_xlabel("epoch")
    axes.set_ylabel(title)
    axes.grid()


def _scale(axes: Axes, num_epochs: int) -> None:
    """Scales the axes of all panels, which are shared: whole epochs and whole percents."""
    margin = max(0.5, 0.03 * num_epochs)
    axes.set_xlim(1 - margin, num_epochs + margin)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    low, high = axes.get_ylim()
    room = max(0.01, (0.2 - (high - low)) / 2)  # At least 20 points: noise looks small.
    axes.set_ylim(max(0.0, low - room), min(1.0, high + room))
    axes.yaxis.set_major_locator(MaxNLocator(nbins=9, steps=[1, 2, 5, 10]))
    axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))


def _title(summaries: Sequence[Summary]) -> str:
    """Returns what is trained, and below which strategies on which devices."""
    lines: dict[str, dict[str, list[str]]] = {}
    for s in summaries:
        fault = f"INJECTED FAULT: {s.injected_fault}\n" if s.injected_fault else ""
        recipe = f" recipe {s.recipe}," if s.recipe else ""
        what = (
            f"{fault}{s.model} on {dataset_title(s.dataset)} ({s.num_train_examples:,} images),"
            f"{recipe} batch {s.global_batch_size}, lr {s.learning_rate:g}"
        )
        place = devices_text(s.devices, s.simulated_devices)
        if s.simulated_devices:
            place = f"{len(s.devices)} {TIMING_CAVEAT}"
        lines.setdefault(what, {}).setdefault(place, []).append(s.strategy)
    (what, places), *others = lines.items()
    if others:  # Trainings of several kinds: the page has their settings.
        return "\n".join(lines)
    return "\n".join([what, *(f"{', '.join(names)} on {at}" for at, names in places.items())])
