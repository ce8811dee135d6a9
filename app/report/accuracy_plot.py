"""Draws accuracy figures from the records on disk.

The colours are from Okabe and Ito, distinguishable with colour blindness. Every curve also has its
own line style and marker, so that curves can be told apart in greyscale and where they coincide.
"""

import dataclasses
import io
import itertools
import math
import pathlib
from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter

from app.records.caveats import TIMING_CAVEAT, dataset_title
from app.records.files import write_file
from app.records.history import (
    EpochRecord,
    Summary,
    load_history,
    load_required_summary,
)

Run = tuple[Summary, Sequence[EpochRecord]]


@dataclasses.dataclass(frozen=True)
class _Look:
    colour: str
    line: str
    marker: str
    width: float


# From wide and below to narrow and above, so that coinciding curves all remain visible.
_LOOKS = (
    _Look("#0072B2", "-", "o", 4.5),
    _Look("#E69F00", "-", "s", 2.2),
    _Look("#000000", ":", "^", 1.4),
    _Look("#CC79A7", "--", "D", 1.2),
    _Look("#009E73", "-.", "v", 1.2),
    _Look("#56B4E9", "--", "P", 1.2),
    _Look("#D55E00", ":", "X", 1.2),
    _Look("#0072B2", "--", "<", 1.0),
    _Look("#E69F00", ":", ">", 1.0),
    _Look("#000000", "-.", "*", 1.0),
)


def plot_accuracy(run_dirs: Sequence[pathlib.Path], out_dir: pathlib.Path) -> None:
    """Draws accuracy over epochs into `accuracy.png` and `accuracy.svg`, atomically.

    For one run, test and train accuracy share a panel. For several, there is a panel each for test
    and train accuracy, with one curve per run. For a case, draws the losses and its first metric.

    Args:
        run_dirs: run directories with at least one finished epoch each.
        out_dir: output directory.
    """
    runs = [(load_required_summary(path), load_history(path)) for path in run_dirs]
    if runs[0][0].case:
        figure = _draw_case(runs)
    else:
        figure = _draw_one(*runs[0]) if len(runs) == 1 else _draw_several(runs)
    save_figure(figure, out_dir, "accuracy")


def save_figure(figure: Figure, out_dir: pathlib.Path, name: str) -> None:
    """Saves a figure as PNG and SVG, atomically."""
    for suffix in ("png", "svg"):
        # Rendered in memory first: matplotlib does not report a full disk.
        content = io.BytesIO()
        figure.savefig(content, format=suffix, dpi=150)
        figure.set_layout_engine("none")  # Already laid out; do not repeat it for the next format.
        write_file(out_dir / f"{name}.{suffix}", content.getvalue())


def _draw_one(summary: Summary, history: Sequence[EpochRecord]) -> Figure:
    figure = Figure(figsize=(7, 4.6), layout="constrained")
    axes = figure.subplots()
    test = _Look("#0072B2", "-", "o", 2.0)
    train = _Look("#D55E00", "--", "s", 1.5)
    _draw_curve(axes, history, "train_accuracy", train, "train")
    _draw_curve(axes, history, "test_accuracy", test, "test")
    _finish_accuracy(axes, summary.epochs, "accuracy")
    handles, labels = axes.get_legend_handles_labels()
    axes.legend(handles[::-1], labels[::-1], loc="lower right")
    _set_title(figure, [(summary, history)])
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
        for look, (each, history) in zip(itertools.cycle(_LOOKS), runs, strict=False):
            _draw_curve(axes, history, field, look, each.strategy, form=".4g")
        _finish(axes, summary.epochs, title)
        axes.legend()
    _set_title(figure, runs)
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
        for look, (summary, history) in zip(itertools.cycle(_LOOKS), runs, strict=False):
            _draw_curve(axes, history, field, look, summary.strategy)
        _finish_accuracy(axes, runs[0][0].epochs, name)
    panels[0].legend(loc="lower right")
    _set_title(figure, runs)
    return figure


def _set_title(figure: Figure, runs: Sequence[Run]) -> None:
    places: dict[str, list[str]] = {}
    for summary, _ in runs:
        places.setdefault(_where(summary), []).append(summary.strategy)
    lines = [f"{', '.join(strategies)} on {place}" for place, strategies in places.items()]
    figure.suptitle(
        "\n".join([_what(runs[0][0]), *lines]), fontsize=11, ha="left", x=0.02, linespacing=1.4
    )


def _draw_curve(
    axes: Axes,
    history: Sequence[EpochRecord],
    field: str,
    look: _Look,
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


def _finish(axes: Axes, epochs: int, name: str) -> None:
    axes.set_xlabel("epoch")
    axes.set_ylabel(name)
    axes.set_xlim(1 - max(0.5, 0.03 * epochs), epochs + max(0.5, 0.03 * epochs))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    axes.grid(True, color="0.9", linewidth=0.8)
    axes.spines[["top", "right"]].set_visible(False)


def _finish_accuracy(axes: Axes, epochs: int, name: str) -> None:
    _finish(axes, epochs, name)
    low, high = axes.get_ylim()
    room = max(0.01, (0.2 - (high - low)) / 2)  # At least 20 points: noise looks small.
    axes.set_ylim(max(0.0, low - room), min(1.0, high + room))
    axes.yaxis.set_major_locator(MaxNLocator(nbins=9, steps=[1, 2, 5, 10]))  # Whole percents.
    axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))


def _what(summary: Summary) -> str:
    dataset = dataset_title(summary.dataset)
    fault = f"INJECTED FAULT: {summary.injected_fault}\n" if summary.injected_fault else ""
    noun, recipe = "images", f" recipe {summary.recipe},"
    if summary.case:
        noun, recipe = "examples", ""
    return fault + (
        f"{summary.model} on {dataset} ({summary.num_train_examples:,} {noun}),{recipe}"
        f" batch {summary.global_batch_size}, lr {summary.learning_rate:g}"
    )


def _where(summary: Summary) -> str:
    if summary.simulated_devices:
        return f"{len(summary.devices)} {TIMING_CAVEAT}"
    kind = "GPU" if "GPU" in summary.devices[0] else "CPU"
    return f"{len(summary.devices)} {kind}" + ("s" if len(summary.devices) > 1 else "")
