"""Defines the style of figures: curves, axes, titles and output files.

Colours are those of Okabe and Ito, which the colour-blind can tell apart; every curve has a line
style and a marker too, so that curves can be distinguished in grey and where they coincide.
"""

import dataclasses
import io
import pathlib
from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter

from app.records.caveats import TIMING_CAVEAT, dataset_title
from app.records.files import write_file
from app.records.history import Summary


@dataclasses.dataclass(frozen=True)
class Look:
    """The colour, line style, marker and line width of a curve."""

    colour: str
    line: str
    marker: str
    width: float


# From wide and below to narrow and above: of curves that coincide all remain visible.
LOOKS = (
    Look("#0072B2", "-", "o", 4.5),
    Look("#E69F00", "-", "s", 2.2),
    Look("#000000", ":", "^", 1.4),
    Look("#CC79A7", "--", "D", 1.2),
    Look("#009E73", "-.", "v", 1.2),
    Look("#56B4E9", "--", "P", 1.2),
    Look("#D55E00", ":", "X", 1.2),
    Look("#0072B2", "--", "<", 1.0),
    Look("#E69F00", ":", ">", 1.0),
    Look("#000000", "-.", "*", 1.0),
)


def save_figure(figure: Figure, out_dir: pathlib.Path, name: str) -> None:
    """Saves a figure as PNG and SVG, atomically."""
    for suffix in ("png", "svg"):
        # Rendered in memory first: matplotlib does not report a full disk.
        content = io.BytesIO()
        figure.savefig(content, format=suffix, dpi=150)
        figure.set_layout_engine("none")  # Already laid out; do not repeat it for the next format.
        write_file(out_dir / f"{name}.{suffix}", content.getvalue())


def set_title(figure: Figure, summaries: Sequence[Summary]) -> None:
    """Sets the title of a figure: model, data, strategy and devices."""
    places: dict[str, list[str]] = {}
    for summary in summaries:
        places.setdefault(_where(summary), []).append(summary.strategy)
    lines = [f"{', '.join(strategies)} on {place}" for place, strategies in places.items()]
    figure.suptitle(
        "\n".join([_what(summaries[0]), *lines]), fontsize=11, ha="left", x=0.02, linespacing=1.4
    )


def finish_axes(axes: Axes, epochs: int, name: str) -> None:
    """Labels axes over epochs."""
    axes.set_xlim(1 - max(0.5, 0.03 * epochs), epochs + max(0.5, 0.03 * epochs))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    label_axes(axes, "epoch", name)


def label_axes(axes: Axes, over: str, name: str) -> None:
    """Labels axes and draws the grid."""
    axes.set_xlabel(over)
    axes.set_ylabel(name)
    axes.grid(True, color="0.9", linewidth=0.8)
    axes.spines[["top", "right"]].set_visible(False)


def scale_accuracy(axes: Axes) -> None:
    """Scales the vertical axis to whole percents, with a range of at least 20 points."""
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
