"""Draws a pipeline's schedule: stages from top to bottom, time from left to right."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from matplotlib.axes import Axes
from matplotlib.patches import Rectangle
from matplotlib.ticker import MaxNLocator

from app.report.charts import GROUND, LEFT, RULE, SERIES, Chart, drawing_axes

_ROW, _AROUND, _BOTTOM = 34, 30, 42
_BLACK = "#010101"  # In the dark theme, too, on a light colour.
_SMALLEST_SHARE = 0.018  # Fraction of the width; narrower passes have no number.


class Pass(NamedTuple):
    """One pass of one micro-batch through one stage, with start and end."""

    stage: int
    is_forward: bool
    micro_batch: int
    start: float
    end: float


def passes_in_slots(slots: Sequence[Sequence]) -> list[Pass]:
    """Converts time slots to passes of one slot each."""
    return [
        Pass(stage, is_forward, micro_batch, slot, slot + 1)
        for slot, tasks in enumerate(slots)
        for stage, is_forward, micro_batch in tasks
    ]


def passes_in_time(tasks: Sequence[Sequence]) -> list[Pass]:
    """Converts timed tasks to passes, in milliseconds."""
    return [
        Pass(stage, is_forward, micro_batch, 1e3 * start, 1e3 * end)
        for stage, is_forward, micro_batch, start, end in tasks
    ]


def schedule_chart(title: str, passes: Sequence[Pass], num_stages: int, unit: str) -> Chart:
    """Draws a box for each pass; grey is idle time.

    Args:
        title: title of the chart.
        passes: passes of all stages.
        num_stages: K.
        unit: unit of the time.
    """
    height = _AROUND + _BOTTOM + _ROW * num_stages
    with drawing_axes(height, LEFT, _BOTTOM) as (axes, svg):
        axes.set_title(title, x=0)
        draw_passes(axes, passes, num_stages, colours=SERIES[:2], texts=(GROUND, _BLACK))
        axes.set_xlabel(unit)
        axes.grid(False)
        drawing = svg()
    return Chart(title, _described(title, passes, num_stages), height, drawing)


def draw_passes(
    axes: Axes,
    passes: Sequence[Pass],
    num_stages: int,
    *,
    colours: Sequence[str],
    texts: Sequence[str],
) -> None:
    """Draws the passes of all stages.

    Args:
        axes: axes to draw on.
        passes: passes of all stages.
        num_stages: K.
        colours: colours of forward and backward passes.
        texts: colours of the micro-batch numbers in them.
    """
    last = max(each.end for each in passes)
    for stage in range(num_stages):  # Its visible rest is idle time.
        track: Any = {"facecolor": RULE, "linewidth": 0, "alpha": 0.5}
        axes.add_patch(Rectangle((0, stage - 0.42), last, 0.84, **track))
    for each in passes:
        kind, width = 0 if each.is_forward else 1, each.end - each.start
        look: Any = {"facecolor": colours[kind], "edgecolor": GROUND, "linewidth": 1}
        axes.add_patch(Rectangle((each.start, each.stage - 0.42), width, 0.84, **look))
        if width >= _SMALLEST_SHARE * last:
            look = {"ha": "center", "va": "center", "color": texts[kind], "fontsize": 9}
            axes.text(each.start + width / 2, each.stage, str(each.micro_batch), **look)
    axes.set_xlim(0, last)
    axes.set_ylim(num_stages - 0.45, -0.55)
    axes.set_yticks(range(num_stages), [f"stage {k}" for k in range(num_stages)])
    axes.xaxis.set_major_locator(MaxNLocator(8, integer=True))
    axes.tick_params(length=0)
    axes.spines[["top", "right", "left"]].set_visible(False)


def _described(title: str, passes: Sequence[Pass], num_stages: int) -> str:
    rows = []
    for stage in range(num_stages):
        own = sorted((each for each in passes if each.stage == stage), key=lambda p: p.start)
        names = [f"{'F' if each.is_forward else 'B'}{each.micro_batch}" for each in own]
        rows.append(f"stage {stage}: {' '.join(names)}")
    return f"{title}; forward (F) and backward (B) passes in order. {'; '.join(rows)}"
