"""Draws bars with intervals: the figure of `benchmark`."""

import math
import pathlib
from collections.abc import Mapping

import matplotlib
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from app.report.plot_style import LOOKS, STYLE, save_figure, set_title

Interval = tuple[float, float, float]  # Value, lower and upper end.

_NO_KIND = LOOKS[2]


@matplotlib.rc_context(STYLE)
def plot_bars(
    title: str,
    panels: Mapping[str, Mapping[str, Interval]],
    out_dir: pathlib.Path,
    name: str,
    *,
    kinds: Mapping[str, str] | None = None,
) -> None:
    """Draws panels one below the other into `name`.png and `name`.svg.

    Args:
        title: title of the figure.
        panels: label of the axis → name of each bar → its interval; empty panels are left out.
        out_dir: output directory.
        name: name of the files.
        kinds: name of a bar → its kind, which has a colour and a place in the legend.
    """
    shown = {label: bars for label, bars in panels.items() if bars}
    counts = [len(bars) for bars in shown.values()]
    size = 8.5, 0.8 + 0.2 * title.count("\n") + sum(0.8 + 0.36 * count for count in counts)
    figure = Figure(figsize=size, layout="constrained")
    axes_of = figure.subplots(
        len(counts), 1, squeeze=False, height_ratios=[count + 1 for count in counts]
    )[:, 0]
    kinds = kinds or {}
    looks = dict(zip(dict.fromkeys(kinds.values()), LOOKS, strict=False))
    for axes, (label, bars) in zip(axes_of, shown.items(), strict=True):
        for row, (bar, (value, low, high)) in enumerate(bars.items()):
            look = looks.get(kinds.get(bar, ""), _NO_KIND)
            axes.barh(row, value, 0.7, color=look.colour, alpha=0.6, linewidth=0)
            if math.isfinite(low) and math.isfinite(high):
                # Not as error bars: an interval need not contain its value.
                axes.plot([low, high], [row, row], "|-", color="black", linewidth=1.5, markersize=9)
        axes.set_yticks(range(len(bars)), list(bars))
        axes.set_ylim(len(bars) - 0.4, -0.6)
        axes.set_xlim(left=0)
        axes.set_xlabel(label, loc="right")  # It may be longer than the axis.
        axes.grid(axis="x")
    handles: list[Line2D | Patch] = [
        Patch(color=look.colour, alpha=0.6, label=kind) for kind, look in looks.items()
    ]
    handles.append(Line2D([], [], color="black", marker="|", label="95 % interval"))
    figure.legend(
        handles=handles, loc="outside lower right", ncols=len(handles), frameon=False, fontsize=9
    )
    set_title(figure, title)
    save_figure(figure, out_dir, name)
