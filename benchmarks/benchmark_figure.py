"""Draws images per second of every program, with intervals, in one panel per part."""

import pathlib
from typing import Any

from matplotlib.figure import Figure

from app.performance import interval
from app.report.bar_plot import draw_bars
from app.report.plot_style import save_figure

_COLOURS = {"": "#0072B2", "PyTorch": "#D55E00", "JAX": "#009E73", "Keras": "#CC79A7"}


def draw(results: dict[str, Any], out_dir: pathlib.Path, name: str) -> None:
    """Draws the parts of a run, as PNG and SVG.

    Args:
        results: see `benchmark_page.render`; "parts" is not empty.
        out_dir: output directory.
        name: name of the files, without suffix.
    """
    parts = list(results["parts"].values())
    counts = [sum(not each.startswith("peak") for each in part["programs"]) for part in parts]
    figure = Figure(figsize=(8.5, 0.6 + sum(0.75 + 0.3 * n for n in counts)), layout="constrained")
    panels = figure.subplots(len(parts), 1, squeeze=False, height_ratios=[n + 1 for n in counts])
    for part, (axes,) in zip(parts, panels, strict=True):
        programs = {n: r for n, r in part["programs"].items() if not n.startswith("peak")}
        rates = [interval.combine(lambda sec: 1 / sec, r["secs"]) for r in programs.values()]
        colours = [_COLOURS.get(r["peer"], "0.5") for r in programs.values()]
        draw_bars(axes, [(r.value, r.low, r.high) for r in rates], colours, height=0.75)
        axes.set_yticks(range(len(programs)), list(programs))
        axes.set_ylim(len(programs) - 0.4, -0.6)
        axes.set_xlim(left=0)
        axes.grid(axis="x", alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
        axes.set_title(part["title"].replace("`", ""), fontsize=10, loc="left")
    panels[-1][0].set_xlabel("images per second, median with 95 % interval")
    figure.suptitle(
        f"{results['processor']}, {results['cores']} cores shared by all devices of a program",
        fontsize=11, ha="left", x=0.02,
    )  # fmt: skip
    save_figure(figure, out_dir, name)
