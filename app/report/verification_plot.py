"""Draws the figure of `verify`: how far each array of each step is from what is expected."""

import pathlib
import string
import textwrap
from collections.abc import Iterable, Mapping, Sequence

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from app.report.plot_style import STYLE, save_figure, set_title
from app.report.result import Facts, Result
from lockstep.answer.text import share_of
from lockstep.answer.verdict import Measurement

_PANELS = {
    "forward": "forward: predictions",
    "loss": "loss of each shard",
    "gradients": "gradients of each replica",
    "all-reduce": "all-reduce: their sum",
    "update": "update: weights, given the sum",
    "statistics": "moving statistics and seeds",
}
_FLOOR, _CEILING = 1e-4, 1e8  # Fractions of the tolerance are drawn within these.
_RIGHT, _WRONG, _BAND = "#0072B2", "#D55E00", "#009E73"
_MOST_TICKS = 8

Line = list[tuple[int, float]]  # Of a tensor and item: step, distance / allowed.


def plot_verification(
    measured: Mapping[str, Sequence[Measurement]],
    step_names: Sequence[str],
    result: Result,
    out_dir: pathlib.Path,
) -> None:
    """Draws `verify.png` and `verify.svg`.

    Args:
        measured: name of a training, or of several with equal results → its measurements.
        step_names: names of all steps.
        result: verdicts, findings and set-up, for the texts of the figure.
        out_dir: output directory.
    """
    save_figure(_draw(measured, step_names, result), out_dir, "verify")


@matplotlib.rc_context(STYLE)
def _draw(
    measured: Mapping[str, Sequence[Measurement]], step_names: Sequence[str], result: Result
) -> Figure:
    rows = {name: _lines(own) for name, own in measured.items()}
    worst = _largest(rows.values())
    stages = {stage: title for stage, title in _PANELS.items() if stage in worst}
    stages |= {stage: stage for stage, share in worst.items() if stage not in stages and share > 1}
    stages = stages or {stage: stage for stage in worst}
    ticks, letters = _ticks(step_names, max(m.step for own in measured.values() for m in own))
    width = 2.6 * len(stages) + 0.8
    told = [*result.caveats, *(sentence for _, sentence in result.verdicts)]
    title = _wrapped(told, min(110, int(12 * width)))
    notes = _wrapped(_notes(result, letters), min(140, int(14.5 * width)))
    height = 2.2 * len(rows) + 0.25 * title.count("\n") + 0.18 * notes.count("\n") + 1.0
    figure = Figure(figsize=(width, height), layout="constrained")
    panels = figure.subplots(len(rows), len(stages), sharex=True, sharey=True, squeeze=False)
    for row, (name, lines_of) in zip(panels, rows.items(), strict=True):
        for axes, stage in zip(row, stages, strict=True):
            _draw_panel(axes, lines_of.get(stage, []))
        row[0].set_ylabel(f"{_plain(name)}\ndifference / allowed")
    panels[0, 0].set_ylim(_FLOOR / 2, max(10, 5 * max(worst.values())))  # Shared by all panels.
    for axes, stage_title in zip(panels[0], stages.values(), strict=True):
        axes.set_title(stage_title, fontsize=9)
    for axes in panels[-1]:
        axes.set_xlabel("step")
        axes.set_xticks(list(ticks), list(ticks.values()))
    set_title(figure, title)
    figure.supxlabel(notes, fontsize=9, color="0.25", ha="left", x=0.01, linespacing=1.4)
    return figure


def _largest(rows: Iterable[Mapping[str, Sequence[Line]]]) -> dict[str, float]:
    """Returns stage → the largest fraction of what rounding allows."""
    worst: dict[str, float] = {}
    for lines_of in rows:
        for stage, lines in lines_of.items():
            largest = max(share for line in lines for _, share in line)
            worst[stage] = max(worst.get(stage, 0.0), largest)
    return worst


def _lines(measured: Sequence[Measurement]) -> dict[str, list[Line]]:
    """Returns stage → a line for each tensor and item, of fractions of what rounding allows."""
    lines: dict[str, dict[tuple[str, str], Line]] = {}
    for each in measured:
        of_stage = lines.setdefault(each.stage, {})
        point = each.step, min(max(share_of(each), _FLOOR), _CEILING)
        of_stage.setdefault((each.tensor, each.item), []).append(point)
    return {stage: list(of_stage.values()) for stage, of_stage in lines.items()}


def _ticks(step_names: Sequence[str], last: int) -> tuple[dict[int, str], list[str]]:
    """Returns position → label up to the last drawn step, and what letters stand for.

    Steps with a number have it, every second or fifth one if they are many, always the last one.
    Other steps, such as the last batch of an epoch, have a letter.
    """
    shown = list(step_names)[: last + 1]
    numbered = [i for i, name in enumerate(shown) if name.startswith("step ")]
    stride = next(n for n in (1, 2, 5, 10, len(shown)) if len(numbered) <= n * _MOST_TICKS)
    ticks = {i: shown[i].removeprefix("step ") for i in numbered[::-1][::stride]}
    others = [i for i in range(len(shown)) if i not in numbered]
    letters = dict(zip(others, string.ascii_lowercase, strict=False))
    return ticks | letters, [f"{letter}: {shown[i]}" for i, letter in letters.items()]


def _draw_panel(axes: Axes, lines: Sequence[Line]) -> None:
    """Draws a line for each tensor and item; the band is the computed tolerance."""
    axes.axhspan(_FLOOR / 10, 1, color=_BAND, alpha=0.13, linewidth=0)
    for points in lines:
        wrong = any(share > 1 for _, share in points)
        axes.plot(
            *zip(*points, strict=True),
            color=_WRONG if wrong else _RIGHT,
            alpha=0.9 if wrong else max(0.12, min(0.8, 6 / len(lines))),
            linewidth=1.6 if wrong else 1.0,
            marker="o" if len(points) < 8 or wrong else "",
            markersize=3,
        )
    axes.axhline(1, color=_BAND, linewidth=1.2)
    axes.set_yscale("log")
    axes.minorticks_off()  # They take half of the time of a figure.
    axes.yaxis.set_major_formatter(lambda share, _: f"{share:g}")
    axes.margins(x=0.05)
    axes.grid()


def _notes(result: Result, letters: Sequence[str]) -> list[str]:
    """Returns the findings, the set-up and how to read the figure and the letters of its steps."""
    facts = [block for block in result.blocks if isinstance(block, Facts)]
    findings = [f"{block.title}: {block.facts['why']}" for block in facts if block.title]
    (setup,) = (block.facts for block in facts if not block.title)
    legend = (
        "A line for each tensor and replica, values below 1e-4 on the lower edge. Green: what"
        " rounding allows. Each step starts from the recorded state."
    )
    about = [f"{name}: {text}" for name, text in setup.items()]
    steps = [f"step {'; '.join(letters)}"] if letters else []
    return [*findings, *about, *steps, legend]


def _wrapped(texts: Iterable[str], columns: int) -> str:
    lines = (line for text in texts for line in textwrap.wrap(text, columns))
    return "\n".join(map(_plain, lines))


def _plain(text: str) -> str:
    """Returns text in which matplotlib finds no formula."""
    return text.replace("$", r"\$")
