"""Draws the figure of each kind of processor from its table on the page of the benchmark.

    python benchmarks/figure.py docs/BENCHMARKS.md    redraws all figures of the page

The figure has the numbers of the table and no others: it can be drawn again without measurements.
"""

import argparse
import dataclasses
import pathlib
import re
import sys
from collections.abc import Sequence

FOLDER = pathlib.Path(__file__).parent
sys.path.insert(0, str(FOLDER.parent))

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from app.report.plot_style import LOOKS, STYLE, Look, save_figure, set_title

BESIDE_KERAS, RECIPE, DEFAULT_RECIPE = ", beside Keras", ", recipe ", "d2l"
_BFLOAT16 = ", bfloat16"
_ROW = re.compile(
    r"\| (.*?) ?\| (.+?) \| [\d,]+ \| (.+?) \| [\d,]+ \| ([\d.]+) \(([\d.]+)–([\d.]+)\) \|"
)
# Kind of a comparison → how it is drawn; in this order in each panel.
_LOOKS = {
    "against another project, float32": LOOKS[0],
    "against another project, both bfloat16": LOOKS[4],
    "bfloat16 against float32: another precision": Look("#D55E00", "-", "D", 1.2),
    "within this project, float32": LOOKS[2],
}
_BOTH_FLOAT32, _BOTH_BFLOAT16, _MIXED, _OWN = _LOOKS
_TICKS = (0.05, 0.07, 0.1, 0.14, 0.2, 0.3, 0.4, 0.5, 0.7, 1, 1.4, 2, 3, 4, 5, 7, 10)
_PEERS = ("PyTorch", "JAX", "Keras", "d2l")


@dataclasses.dataclass(frozen=True)
class Row:
    """A ratio of the table.

    Attributes:
        training: model, batch and recipe.
        name: the first program.
        base: the program that it is compared with.
        ratio: time of the first over that of the other.
        low: lower end of the ratio's 95 % interval.
        high: its upper end.
    """

    training: str
    name: str
    base: str
    ratio: float
    low: float
    high: float

    @property
    def kind(self) -> str:
        """The kind of the comparison, a key of `_LOOKS`."""
        if (_BFLOAT16 in self.name) != (_BFLOAT16 in self.base):
            return _MIXED
        if not self.base.startswith(_PEERS):
            return _OWN
        return _BOTH_BFLOAT16 if _BFLOAT16 in self.name else _BOTH_FLOAT32

    @property
    def label(self) -> str:
        """Both programs; with the precision of both if it differs."""
        base = f"{self.base}, float32" if self.kind == _MIXED else self.base
        return f"{self.name}  /  {base}"


def figure_name(machine: str) -> str:
    """Returns the file name of a processor's figure."""
    return f"benchmarks-{re.sub(r'[^a-z0-9]+', '-', machine.lower()).strip('-')}.png"


def read_rows(section: str) -> list[Row]:
    """Returns the ratios of a section of the page, in the order of its table."""
    rows, training = list[Row](), ""
    for title, name, base, *numbers in _ROW.findall(section):
        if title:
            training = title.removesuffix(BESIDE_KERAS)
            training += "" if RECIPE in training else f"{RECIPE}{DEFAULT_RECIPE}"
        rows.append(Row(training, name, base, *map(float, numbers)))
    return rows


def draw_ratios(machine: str, section: str, folder: pathlib.Path) -> None:
    """Draws the ratios of a processor: a panel for each training, rows by the kind of comparison.

    Args:
        machine: name of the processor, the heading of its section.
        section: text of the section; without rows, nothing is drawn.
        folder: folder of the figure, which is written as PNG and SVG.
    """
    if rows := read_rows(section):
        save_figure(_draw(machine, rows), folder, pathlib.Path(figure_name(machine)).stem)


@matplotlib.rc_context(STYLE)
def _draw(machine: str, rows: Sequence[Row]) -> Figure:
    panels: dict[str, list[Row]] = {}
    for row in sorted(rows, key=lambda row: [*_LOOKS].index(row.kind)):
        panels.setdefault(row.training, []).append(row)
    counts = [len(own) for own in panels.values()]
    figure = Figure(figsize=(9, 1.9 + sum(0.5 + 0.24 * n for n in counts)), layout="constrained")
    all_axes = figure.subplots(
        len(panels), 1, sharex=True, squeeze=False, height_ratios=[n + 0.4 for n in counts]
    )[:, 0]
    for axes, (training, own) in zip(all_axes, panels.items(), strict=True):
        _draw_panel(axes, training, own)
    low, high = min(row.low for row in rows) / 1.15, max(row.high for row in rows) * 1.3
    ticks = [tick for tick in _TICKS if low <= tick <= high]
    all_axes[0].set_xlim(low, high)
    all_axes[0].set_xticks(ticks, [f"{tick:g}" for tick in ticks])  # The axis is shared.
    all_axes[-1].set_xlabel("time of the first program / time of the second, with 95 % interval")
    handles = [
        Line2D([], [], color=look.colour, marker=look.marker, label=kind, **_fill(kind))
        for kind, look in _LOOKS.items()
        if any(row.kind == kind for row in rows)
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=2, frameon=False, fontsize=9)
    set_title(
        figure,
        f"{machine}\n× 2: two devices or processes, which share the cores."
        " Left of the line, the first program is faster.",
    )
    return figure


def _draw_panel(axes: Axes, training: str, rows: Sequence[Row]) -> None:
    """Draws a mark and an interval for each ratio, and the number at the right."""
    for place, row in enumerate(rows):
        look = _LOOKS[row.kind]
        axes.plot([row.low, row.high], [place, place], color=look.colour, linewidth=2)
        axes.plot(row.ratio, place, look.marker, color=look.colour, **_fill(row.kind))
        axes.annotate(
            f"{row.ratio:.3f}", (1, place), xycoords=axes.get_yaxis_transform(), ha="right",
            va="center", fontsize=9, color=look.colour,
        )  # fmt: skip
        if place and row.kind != rows[place - 1].kind:
            axes.axhline(place - 0.5, color="0.85", linewidth=0.8)
    axes.axvline(1, color="black", linewidth=1)
    axes.set_xscale("log", base=2)
    axes.minorticks_off()
    axes.set_yticks(range(len(rows)), [row.label for row in rows], fontsize=9)
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.set_title(training, loc="left", fontsize=10, weight="bold")
    axes.grid(axis="x")


def _fill(kind: str) -> dict[str, str]:
    """Returns the fill of a mark: none where precisions differ, as it is no equal comparison."""
    return {"markerfacecolor": "white"} if kind == _MIXED else {}


def main(arguments: Sequence[str] | None = None) -> None:
    """Redraws the figures of a page."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("page", type=pathlib.Path, help="page with a table for each processor")
    path = parser.parse_args(arguments).page
    for section in re.split(r"^## ", path.read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]:
        machine = section.partition("\n")[0]
        draw_ratios(machine, section, path.parent)
        print(f"saved {path.parent / figure_name(machine)}")


if __name__ == "__main__":
    main()
