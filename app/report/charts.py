"""Figures of a report: where lines, bars, ticks and texts go; the template draws them as SVG.

Drawn here and not by matplotlib, so that text and axes have the colour of the page, light or dark.
Coordinates are those of the SVG, from its upper left corner.
"""

import dataclasses
import itertools
import math
from collections.abc import Mapping, Sequence

from app.report.page_parts import Table, is_finite

COLOURS, STYLES = 7, 4  # Have no factor in common: 28 looks, all different.
_WIDTHS = (4.5, 2.4, 1.8, 1.4)  # Of curves that coincide all remain visible.
_WIDTH, _HEIGHT = 440, 270
_LEFT, _RIGHT, _TOP, _BOTTOM = 58, 14, 34, 42
_MOST_MARKERS = 30
_LONGEST_LABEL = 58
_BAR_ROW = 44


@dataclasses.dataclass(frozen=True)
class Look:
    """How a series is drawn: the same in every chart and in the legend."""

    colour: int
    style: int
    width: float

    @classmethod
    def of(cls, index: int) -> "Look":
        """Returns the look of a series by its position."""
        return cls(index % COLOURS, index % STYLES, _WIDTHS[index % STYLES])


@dataclasses.dataclass(frozen=True)
class Line:
    """One series of a chart."""

    look: Look
    points: str
    markers: Sequence[tuple[float, float]]


@dataclasses.dataclass(frozen=True)
class Bar:
    """One bar, its interval and the texts beside it."""

    y: float
    x: float
    width: float
    low: float | None
    high: float | None
    label: str
    value: str


@dataclasses.dataclass(frozen=True)
class Chart:
    """One SVG.

    Attributes:
        title: what it shows, in a few words.
        description: the same, for who cannot see it.
        width: of its box.
        height: likewise.
        x_ticks: position and text.
        y_ticks: likewise.
        x_label: under the axis.
        lines: those that are drawn first lie below.
        bars: from top to bottom.
        band: top and bottom of what is allowed.
        reference: position of a value that bars are held against.
    """

    title: str
    description: str
    width: float = _WIDTH
    height: float = _HEIGHT
    x_ticks: Sequence[tuple[float, str]] = ()
    y_ticks: Sequence[tuple[float, str]] = ()
    x_label: str = ""
    lines: Sequence[Line] = ()
    bars: Sequence[Bar] = ()
    band: tuple[float, float] | None = None
    reference: float | None = None
    left, right, top, bottom = _LEFT, _RIGHT, _TOP, _BOTTOM


@dataclasses.dataclass(frozen=True)
class Figure:
    """Charts that belong together, with their legend and their numbers.

    Attributes:
        title: what they show.
        charts: side by side where there is room.
        legend: look and name of each series.
        tables: every number that is drawn.
        note: what a reader has to know.
    """

    title: str
    charts: Sequence[Chart]
    legend: Sequence[tuple[Look, str]]
    tables: Sequence[Table]
    note: str = ""
    kind = "figure"


def line_chart(
    title: str,
    series: Mapping[str, Sequence[tuple[int, float]]],
    *,
    x_label: str,
    form: str,
    log: bool = False,
    least_span: float = 0.0,
    most: float = math.inf,
    allowed: float | None = None,
) -> Chart:
    """Draws lines over whole numbers.

    Args:
        title: what the y axis is.
        series: name → points; what is not finite is left out.
        x_label: what the x axis is.
        form: format of the numbers on the y axis.
        log: whether the y axis has powers of ten.
        least_span: of the y axis: less would make noise look large.
        most: the largest value that there can be.
        allowed: all up to here lies in a band.
    """
    drawn = {
        name: [(x, y) for x, y in points if is_finite(y) and (y > 0 or not log)]
        for name, points in series.items()
    }
    ys = [y for points in drawn.values() for _, y in points]
    ys += [] if allowed is None else [allowed, 10 * allowed]  # The band ends within the chart.
    xs = [x for points in drawn.values() for x, _ in points]
    low, high, y_values = _log_axis(ys) if log else _linear_axis(ys, least_span, most)
    first, last = (min(xs), max(xs)) if xs else (0, 1)
    room = max(0.5, 0.03 * (last - first)) if last - first < 20 else 0.02 * (last - first)

    def across(x: float) -> float:
        return _between(_LEFT, _WIDTH - _RIGHT, (x - first + room) / (last - first + 2 * room))

    def down(y: float) -> float:
        if log:
            return _between(
                _HEIGHT - _BOTTOM, _TOP, math.log10(y / low) / (math.log10(high / low) or 1)
            )
        return _between(_HEIGHT - _BOTTOM, _TOP, (y - low) / ((high - low) or 1))

    lines = []
    for index, points in enumerate(drawn.values()):
        places = [(round(across(x), 1), round(down(y), 1)) for x, y in points]
        lines.append(
            Line(
                Look.of(index),
                " ".join(f"{x:g},{y:g}" for x, y in places),
                places if len(places) <= _MOST_MARKERS else [],
            )
        )
    return Chart(
        title,
        _described(title, x_label, drawn, form),
        x_ticks=[(across(x), f"{x:,}") for x in _whole_ticks(first, last)],
        y_ticks=[(down(y), _power(y) if log else f"{y:.{_decimals(y_values)}f}") for y in y_values],
        x_label=x_label,
        lines=sorted(lines, key=lambda line: -line.look.width),
        band=None if allowed is None else (down(allowed), down(low)),
    )


def bar_chart(
    title: str,
    rows: Sequence[tuple[str, float, float | None, float | None]],
    *,
    form: str,
    unit: str,
    reference: float | None = None,
) -> Chart:
    """Draws a bar for each label, with the ends of its interval where they are known.

    Args:
        title: what it shows.
        rows: label, value, lower and upper end.
        form: format of the values.
        unit: of the values.
        reference: a value to hold them against.
    """
    rows = [row for row in rows if is_finite(row[1])]
    known = [v for _, *values in rows for v in values if is_finite(v)] + [0.0, reference or 0.0]
    low, high = min(known), max(known)
    right = _WIDTH - 96  # Room for the value.

    def across(value: float) -> float:
        return round(_between(4, right, (value - low) / ((high - low) or 1)), 1)

    bars = [
        Bar(
            y=_TOP + _BAR_ROW * index,
            x=min(across(0.0), across(value)),
            width=abs(across(value) - across(0.0)),
            low=across(lower) if is_finite(lower) else None,
            high=across(upper) if is_finite(upper) else None,
            label=label if len(label) <= _LONGEST_LABEL else f"{label[: _LONGEST_LABEL - 1]}…",
            value=f"{value:{form}} {unit}".rstrip(),
        )
        for index, (label, value, lower, upper) in enumerate(rows)
    ]
    told = "; ".join(f"{label}: {value:{form}} {unit}".rstrip() for label, value, *_ in rows)
    return Chart(
        title,
        f"{title}, a bar for each: {told}",
        height=_TOP + _BAR_ROW * len(rows) + 8,
        bars=bars,
        reference=None if reference is None else across(reference),
    )


def _between(start: float, end: float, share: float) -> float:
    return start + (end - start) * share


def _described(title: str, x_label: str, drawn: Mapping, form: str) -> str:
    ends = [
        f"{name}: {points[0][1]:{form}} to {points[-1][1]:{form}}"
        for name, points in drawn.items()
        if points
    ]
    return f"{title} over {x_label}s, first to last. " + "; ".join(ends)


def _linear_axis(ys: Sequence[float], least: float, most: float) -> tuple[float, float, list]:
    low, high = (min(ys), max(ys)) if ys else (0.0, 1.0)
    room = max((least - (high - low)) / 2, 0.06 * (high - low), 1e-3)
    low, high = max(0.0, low - room), min(most, high + room)
    step = _round_step((high - low) / 5)
    first = math.ceil(low / step - 1e-9)
    ticks = [i * step for i in range(first, math.floor(high / step + 1e-9) + 1)]
    return low, high, ticks


def _decimals(ticks: Sequence[float]) -> int:
    """Returns how many decimals all ticks of an axis need, so that they look alike."""
    step = min((b - a for a, b in itertools.pairwise(ticks)), default=1.0)
    return max(0, -math.floor(math.log10(step) + 1e-9))


def _log_axis(ys: Sequence[float]) -> tuple[float, float, list]:
    low = math.floor(math.log10(min(ys))) if ys else 0
    high = max(math.ceil(math.log10(max(ys))) if ys else 1, low + 1)
    stride = max(1, math.ceil((high - low) / 6))
    return 10.0**low, 10.0**high, [10.0**i for i in range(low, high + 1, stride)]


def _power(value: float) -> str:
    exponent = str(round(math.log10(value)))
    return "10" + exponent.translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))


def _whole_ticks(first: int, last: int) -> list[int]:
    step = max(1, math.ceil(_round_step((last - first) / 6))) if last > first else 1
    return list(range(-(-first // step) * step, last + 1, step)) or [first]


def _round_step(step: float) -> float:
    power = 10.0 ** math.floor(math.log10(step)) if step > 0 else 1.0
    return next(m * power for m in (1, 2, 5, 10) if m * power >= step * (1 - 1e-9))
