"""Draws the figure of `verify --case` and `--traces` from `verify.json`."""

import pathlib
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties
from matplotlib.patches import Rectangle
from matplotlib.textpath import TextToPath

from app.records.case_record import (
    BY_DESIGN,
    CLEAN,
    FAULT,
    one_line,
    shortened,
    stage_status,
    stages_of,
    verdict,
)
from app.records.files import read_json
from app.report.plot_style import save_figure

# Status → background, text colour and symbol; the symbol is sufficient without colours.
_LOOKS = {
    FAULT: ("#D55E00", "#FFFFFF", "✗ "),
    BY_DESIGN: ("#FFE9B8", "#5C4500", "≠ "),
    CLEAN: ("#E2F3EC", "#0A6B4D", "✓ "),
}
_NOT_CHECKED = ("#F3F4F5", "#57606A", "")
_SIZE, _LINE = 9, 0.18  # Font size in points, line height in inches.
_HINTING = 1.05  # Hinted letters are wider than their outlines.
_GAP = 0.04  # Between cells, in inches.
_PADDING = 0.1
_STAGE_WIDTH, _LEAST_WIDTH, _USUAL_WIDTH = 1.45, 1.75, 6.4

Rows = list[tuple[str, list[tuple[str, list[str]]]]]  # Stage; status and lines of each cell.


def plot_case(path: pathlib.Path) -> None:
    """Draws `verify.png` and `verify.svg` into the directory that holds `verify.json`."""
    record = read_json(path / "verify.json")
    # Names are a user's: a `$` is not a formula, and a font may lack characters.
    with matplotlib.rc_context({"text.parse_math": False}), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph")
        save_figure(_draw(record), path, "verify")


def _draw(record: Mapping[str, Any]) -> Figure:
    runs = record["strategies"]
    cell_width = max(_LEAST_WIDTH, _USUAL_WIDTH / len(runs))
    width = _STAGE_WIDTH + cell_width * len(runs) + 2 * _PADDING
    title = _title(record, width - 2 * _PADDING)
    rows = _rows(runs, cell_width - _GAP - 2 * _PADDING)
    heights = [_LINE * max(len(lines) for _, lines in cells) + 0.14 for _, cells in rows]
    names = [_wrapped(one_line(name), cell_width - 2 * _PADDING) for name in runs]
    header = _LINE * max(map(len, names)) + 0.14
    height = 3 * _PADDING + _LINE * len(title) + header + sum(heights)
    figure = Figure(figsize=(width, height))
    axes = figure.add_axes((0, 0, 1, 1))  # In inches, from the upper left corner.
    axes.set_axis_off()
    axes.set_xlim(0, width)
    axes.set_ylim(height, 0)
    for number, (line, is_bold) in enumerate(title):
        _write(axes, _PADDING, _PADDING + _LINE * (number + 0.5), line, is_bold=is_bold)
    top = 2 * _PADDING + _LINE * len(title)
    lefts = [_PADDING + _STAGE_WIDTH + cell_width * column for column in range(len(runs))]
    for left, lines in zip(lefts, names, strict=True):
        for number, line in enumerate(lines):
            _write(axes, left + _PADDING, top + _LINE * (number + 0.5), line, is_bold=True)
    top += header
    for (stage, cells), row_height in zip(rows, heights, strict=True):
        _write(axes, _PADDING, top + row_height / 2, stage)
        for left, (status, lines) in zip(lefts, cells, strict=True):
            size = cell_width - _GAP, row_height - _GAP
            _draw_cell(axes, (left, top + _GAP / 2), size, status, lines)
        top += row_height
    return figure


def _rows(runs: Mapping[str, Mapping[str, Any]], width: float) -> Rows:
    """Returns the contents of each cell, in lines of at most `width` inches."""
    rows: Rows = []
    for stage in stages_of(runs.values()):
        cells = []
        for run in runs.values():
            status, causes = stage_status(run, stage)
            _, _, symbol = _LOOKS.get(status, _NOT_CHECKED)
            texts = [f"{symbol}{status}: {cause}" for cause in causes] or [f"{symbol}{status}"]
            cells.append((status, [line for text in texts for line in _wrapped(text, width)]))
        rows.append((stage, cells))
    return rows


def _draw_cell(
    axes: Axes,
    corner: tuple[float, float],
    size: tuple[float, float],
    status: str,
    lines: Sequence[str],
) -> None:
    ground, colour, _ = _LOOKS.get(status, _NOT_CHECKED)
    axes.add_patch(Rectangle(corner, *size, facecolor=ground, edgecolor="none"))
    left, middle = corner[0] + _PADDING, corner[1] + size[1] / 2
    for number, line in enumerate(lines):
        y = middle + _LINE * (number - (len(lines) - 1) / 2)
        _write(axes, left, y, line, colour=colour, is_bold=status == FAULT)


def _write(
    axes: Axes, x: float, y: float, text: str, *, colour: str = "#1b1f24", is_bold: bool = False
) -> None:
    weight = "bold" if is_bold else "normal"
    axes.text(x, y, text, color=colour, fontsize=_SIZE, va="center_baseline", fontweight=weight)


def _title(record: Mapping[str, Any], width: float) -> list[tuple[str, bool]]:
    """Returns the lines above the cells, the verdicts, and whether each is bold."""
    runs = record["strategies"]
    verdicts = [verdict(name, run)[1] for name, run in runs.items()]
    lines = [(line, True) for text in verdicts for line in _wrapped(text, width)]
    longest = max(runs.values(), key=lambda run: len(run["steps"]))
    setup = [f"{label} {text}" for label, text in record["setup"].items()]
    more = one_line(
        "; ".join([*setup, ", ".join(shortened(longest["steps"])), record["comparison"]])
    )
    return [*lines, *((line, False) for line in _wrapped(more, width))]


def _wrapped(text: str, width: float) -> list[str]:
    """Wraps text into lines of at most `width` inches; breaks words that are longer."""
    lines, line = [], ""
    for word in text.split():
        joined = f"{line} {word}".lstrip()
        if _width_of(joined) <= width:
            line = joined
            continue
        if line:
            lines.append(line)
        line = ""
        for letter in word:
            if _width_of(line + letter) > width:
                lines.append(line)
                line = ""
            line += letter
    return [*lines, line]


def _width_of(text: str) -> float:
    """Returns the width of a text in bold, in inches."""
    font = FontProperties(size=_SIZE, weight="bold")
    width, _, _ = TextToPath().get_text_width_height_descent(text, font, ismath=False)
    return width * _HINTING / 72
