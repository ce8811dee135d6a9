"""Draws the charts of a report with matplotlib, as inline SVG.

Colours are replaced by CSS variables of the page, for the light and the dark theme. Texts remain
text in the page's font.
"""

import contextlib
import dataclasses
import io
import math
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import matplotlib
from markupsafe import Markup
from matplotlib import figure
from matplotlib.axes import Axes
from matplotlib.ticker import LogLocator, MaxNLocator, NullLocator

from app.report.page_parts import Table, is_finite

COLOURS, STYLES = 7, 4  # No common factor: 28 different looks.
_WIDTHS = (4.5, 2.4, 1.8, 1.4)  # So that coinciding curves all remain visible.
_DASHES = ("-", (0, (9, 4)), (0, (2, 3)), (0, (9, 3, 2, 3)))
_MARKERS = "os^D"
SERIES = ("#0072b2", "#e69f00", "#000000", "#cc79a7", "#009e73", "#56b4e9", "#d55e00")
TEXT, _QUIET, RULE, GROUND = "#1b1f24", "#57606a", "#d5dae0", "#ffffff"
_VARIABLES = {
    **{colour: f"var(--c{index})" for index, colour in enumerate(SERIES)},
    **{TEXT: "var(--text)", _QUIET: "var(--quiet)", RULE: "var(--rule)"},
    GROUND: "var(--ground)",
}
_STYLE: Any = {
    "lines.scale_dashes": False,
    "svg.fonttype": "none", "svg.hashsalt": "chart", "text.parse_math": False, "font.size": 13,
    "text.color": TEXT, "axes.edgecolor": _QUIET, "axes.labelcolor": TEXT,
    "axes.titlesize": 14, "axes.titleweight": "bold", "axes.titlelocation": "left",
    "axes.spines.top": False, "axes.spines.right": False, "axes.spines.left": False,
    "axes.grid": True, "axes.grid.axis": "y", "axes.axisbelow": True, "grid.color": RULE,
    "grid.linewidth": 1, "xtick.color": _QUIET, "ytick.color": RULE, "xtick.labelcolor": TEXT,
    "ytick.labelcolor": TEXT, "ytick.major.size": 0, "axes.linewidth": 1,
    "font.weight": "normal", "savefig.transparent": True,
}  # fmt: skip
_WIDTH, _HEIGHT = 440, 270
LEFT, _RIGHT, _TOP, _BOTTOM = 54, 14, 30, 42  # Margins of the axes.
_BAR_ROW = 44
_MOST_MARKERS = 30
_LONGEST_LABEL = 58


@dataclasses.dataclass(frozen=True)
class Look:
    """The look of a series, equal in every chart and in the legend."""

    colour: int
    style: int
    width: float

    @classmethod
    def of(cls, index: int) -> "Look":
        """Returns the look of a series by its index."""
        return cls(index % COLOURS, index % STYLES, _WIDTHS[index % STYLES])


@dataclasses.dataclass(frozen=True)
class Chart:
    """One chart as SVG.

    Attributes:
        title: short title.
        description: description for screen readers.
        height: height of its box, which is 440 wide.
        drawing: content of the box; its ids are unique only within the chart.
    """

    title: str
    description: str
    height: int
    drawing: str
    width = _WIDTH

    def body(self, chart_id: str) -> Markup:
        """Returns the drawing with ids prefixed by the chart's id, unique in the page."""
        return Markup(re.sub(r'(<path id="|xlink:href="#)', rf"\g<1>{chart_id}-", self.drawing))


@dataclasses.dataclass(frozen=True)
class Figure:
    """Charts that belong together, with their legend and their numbers.

    Attributes:
        title: title of the figure.
        charts: the charts, side by side if there is room.
        legend: look and name of each series.
        tables: every number that is drawn.
        note: a note for the reader.
    """

    title: str
    charts: Sequence[Chart]
    legend: Sequence[tuple[Look, str]]
    tables: Sequence[Table]
    note: str = ""
    kind = "figure"


def line_chart(
    title: str,
    series: Mapping[str, Sequence[tuple[int, float | None]]],
    *,
    x_label: str,
    form: str,
    log: bool = False,
    least_span: float = 0.0,
    most: float = math.inf,
    allowed: float | None = None,
    looks: Sequence[Look] = (),
) -> Chart:
    """Draws lines over integers.

    Args:
        title: title of the y axis.
        series: name → points; values that are not finite are omitted.
        x_label: label of the x axis.
        form: format of the numbers in the description.
        log: whether the y axis is logarithmic.
        least_span: minimum span of the y axis, so that noise does not look large.
        most: largest possible value.
        allowed: upper end of a band of allowed values.
        looks: look of each series; by default from its index.
    """
    drawn = {
        name: [(x, y) for x, y in points if is_finite(y) and (y > 0 or not log)]
        for name, points in series.items()
    }
    ys = [y for points in drawn.values() for _, y in points]
    with drawing_axes(_HEIGHT, LEFT, _BOTTOM) as (axes, svg):
        axes.set_title(_plain(title), x=0)
        axes.set_xlabel(x_label)
        for index, points in enumerate(drawn.values()):
            _draw_line(axes, points, looks[index] if looks else Look.of(index))
        axes.xaxis.set_major_locator(MaxNLocator(6, integer=True, min_n_ticks=1))
        axes.margins(x=0.03)
        if log:
            _set_log_axis(axes, [*ys, *([allowed, 10 * allowed] if allowed else [])])
        else:
            _set_linear_axis(axes, ys, least_span, most)
        if allowed is not None:
            low, _ = axes.get_ylim()
            axes.axhspan(low, allowed, color=SERIES[4], alpha=0.14, linewidth=0)
            axes.axhline(allowed, color=SERIES[4], linewidth=1.5)
            axes.text(
                0.99, allowed * 1.2, "↓ allowed", ha="right", transform=axes.get_yaxis_transform()
            )
        drawing = svg()
    return Chart(title, _described(title, x_label, drawn, form), _HEIGHT, drawing)


def bar_chart(
    title: str,
    rows: Sequence[tuple[str, float, float | None, float | None]],
    *,
    form: str,
    unit: str,
    reference: float | None = None,
) -> Chart:
    """Draws a bar for each label, with the ends of its interval if known.

    Args:
        title: title of the chart.
        rows: label, value, lower and upper end.
        form: format of the values.
        unit: unit of the values.
        reference: value of a reference line.
    """
    rows = [row for row in rows if is_finite(row[1])]
    height = _TOP + 4 + _BAR_ROW * max(1, len(rows))
    shown = [f"{value:{form}} {unit}".rstrip() for _, value, *_ in rows]
    with drawing_axes(height, 4, 4) as (axes, svg):
        axes.set_title(_plain(title), x=0, pad=10)
        draw_bars(axes, [(value, low, high) for _, value, low, high in rows])
        axes.set_axis_off()
        axes.set_ylim(len(rows) - 0.4, -0.6)
        left, right = axes.get_xlim()
        axes.set_xlim(left, right + 0.28 * (right - left))  # Space for the value.
        if reference is not None:
            axes.axvline(reference, color=TEXT, linewidth=1.5, linestyle=(0, (2, 4)))
        box = {"facecolor": GROUND, "edgecolor": "none", "pad": 1.5}  # Drawn over the line.
        for row, ((label, *values), text) in enumerate(zip(rows, shown, strict=True)):
            end = max(0.0, *(value for value in values if is_finite(value)))
            at = {"xycoords": axes.get_yaxis_transform(), "textcoords": "offset points"}
            axes.annotate(_shortened(label), (0, row), (2, 13), bbox=box, **at)
            at["xycoords"] = axes.transData
            axes.annotate(text, (end, row), (8, 0), va="center", bbox=box, **at)
        drawing = svg()
    told = "; ".join(f"{row[0]}: {text}" for row, text in zip(rows, shown, strict=True))
    return Chart(title, f"{title}, a bar for each: {told}", height, drawing)


def draw_bars(
    axes: Axes,
    rows: Sequence[tuple[float, float | None, float | None]],
    colours: Sequence[str] = SERIES[:1],
    height: float = 0.34,
) -> None:
    """Draws horizontal bars from top to bottom, with the ends of their intervals.

    Args:
        axes: axes to draw on.
        rows: value, lower and upper end.
        colours: colours of the bars, repeated.
        height: height of a bar, as a fraction of its row.
    """
    for row, (value, low, high) in enumerate(rows):
        colour = colours[row % len(colours)]
        axes.barh(row, value, height, color=colour, alpha=0.6, linewidth=0)
        if is_finite(low) and is_finite(high):
            # Not as error bars: an interval need not contain its value.
            axes.plot([low, high], [row, row], "|-", color=TEXT, linewidth=1.5, markersize=9)


@contextlib.contextmanager
def drawing_axes(height: int, left: int, bottom: int) -> Iterator:
    """Yields axes to draw on, and a function that returns the drawing as SVG."""
    with matplotlib.rc_context(_STYLE), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # The page's font has letters that this one lacks.
        drawn = figure.Figure((_WIDTH / 72, height / 72))
        # Fixed margins: a layout engine takes longer than the drawing.
        across, down = (_WIDTH - left - _RIGHT) / _WIDTH, (height - _TOP - bottom) / height
        axes = drawn.add_axes((left / _WIDTH, bottom / height, across, down))
        yield axes, lambda: _svg(drawn)


def _svg(drawn: figure.Figure) -> str:
    content = io.StringIO()
    nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
    drawn.savefig(content, format="svg", metadata=nothing)
    text = content.getvalue()
    text = text[text.index("<g id=") : text.rindex("</svg>")]  # Without header and style.
    text = re.sub(r'(?<=<g) id="[^"]*"| clip-path="[^"]*"', "", text)  # All is within the axes.
    text = re.sub(r"<clipPath.*?</clipPath>", "", text, flags=re.DOTALL)
    return re.sub(r"#[0-9a-f]{6}", lambda match: _VARIABLES.get(match[0], match[0]), text)


def _draw_line(axes: Axes, points: Sequence[tuple[int, float]], look: Look) -> None:
    axes.plot(
        [x for x, _ in points],
        [y for _, y in points],
        color=SERIES[look.colour],
        linestyle=_DASHES[look.style],
        linewidth=look.width,
        marker=_MARKERS[look.style] if len(points) <= _MOST_MARKERS else "",
        markersize=4.4 + look.width,
        markerfacecolor=GROUND,
        markeredgewidth=1.5,
        zorder=3 - look.width / 10,  # Wide lines are below.
    )


def _set_linear_axis(axes: Axes, ys: Sequence[float], least: float, most: float) -> None:
    low, high = (min(ys), max(ys)) if ys else (0.0, 1.0)
    room = max((least - (high - low)) / 2, 0.06 * (high - low), 1e-3)
    axes.set_ylim(max(0.0, low - room), min(most, high + room))
    axes.yaxis.set_major_locator(MaxNLocator(6, steps=[1, 2, 5, 10]))


def _set_log_axis(axes: Axes, ys: Sequence[float]) -> None:
    low = math.floor(math.log10(min(ys))) if ys else 0
    high = max(math.ceil(math.log10(max(ys))) if ys else 1, low + 1)
    axes.set_yscale("log")
    axes.set_ylim(10.0**low, 10.0**high)
    axes.yaxis.set_major_locator(LogLocator(numticks=7))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(lambda value, _: _power(value))


def _described(title: str, x_label: str, drawn: Mapping, form: str) -> str:
    ends = [
        f"{name}: {points[0][1]:{form}} to {points[-1][1]:{form}}"
        for name, points in drawn.items()
        if points
    ]
    return f"{title} over {x_label}s, first to last. " + "; ".join(ends)


def _power(value: float) -> str:
    exponent = str(round(math.log10(value)))
    return "10" + exponent.translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))


def _shortened(label: str) -> str:
    plain = _plain(label)
    return plain if len(plain) <= _LONGEST_LABEL else f"{plain[: _LONGEST_LABEL - 1]}…"


def _plain(text: str) -> str:
    """Returns text in one line, with characters that a font can have."""
    return "".join(letter if letter.isprintable() else " " for letter in text)
