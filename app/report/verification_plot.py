"""Draws the figure of `verify`: how far each array of each step is from what is expected.

A stage with an array beyond rounding has a panel over the steps; other stages of the training are
one line of text. Without such an array, all stages are in one panel.
"""

import math
import pathlib
import string
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from app.report.plot_style import LOOKS, STYLE, save_figure, set_title
from app.report.result import Facts, Result
from lockstep.answer.text import CLAUSES, share_of
from lockstep.answer.verdict import STAGES, Measurement

_WRONG, _BAND = "#D55E00", "#009E73"
_RIGHT = tuple(look for look in LOOKS if look.colour != _WRONG)
_FLOOR, _CEILING = 1e-6, 1e8  # Fractions of the tolerance are drawn within these.
_MOST_TICKS = 20
_WIDTH = 9  # Inches.
_COLUMNS = 138  # Of the notes.

Named = Mapping[str, Sequence[Measurement]]  # Name of a training → its measurements.


def plot_verification(
    measured: Named, step_names: Sequence[str], result: Result, out_dir: pathlib.Path
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
def _draw(measured: Named, step_names: Sequence[str], result: Result) -> Figure:
    panels = [
        (name, stage, arrays)
        for name, own in measured.items()
        for stage, arrays in _by_stage(own).items()
        if any(share_of(each) > 1 for each in arrays)
    ]
    told = [*result.caveats, *(sentence for _, sentence in result.verdicts)]
    title = _wrapped(told, 100)
    last = max((each.step for _, _, arrays in panels for each in arrays), default=0)
    ticks, letters = _ticks(step_names, last)
    notes = _wrapped(
        [*_clean_stages(measured, panels), *_notes(result, letters if panels else ())], _COLUMNS
    )
    height = sum(0.19 * text.count("\n") for text in (title, notes)) + 1.3
    height += 2.9 * len(panels) if panels else 2.2
    figure = Figure(figsize=(_WIDTH, height), layout="constrained")
    all_axes = figure.subplots(max(1, len(panels)), 1, sharex=bool(panels), squeeze=False)[:, 0]
    shown = [each for _, _, arrays in panels for each in arrays]
    shown = shown or [each for own in measured.values() for each in own]
    floor = _floor_of(map(share_of, shown))
    for axes, (name, stage, arrays) in zip(all_axes, panels, strict=False):
        _draw_steps(axes, arrays, floor)
        axes.set_title(_wrapped([_heading(name, stage, arrays)], 104), fontsize=10, loc="left")
        axes.set_xticks(list(ticks), list(ticks.values()))
    if panels:
        all_axes[-1].set_xlabel("step")
    else:
        _draw_stages(all_axes[0], measured, floor)
    for axes in all_axes:
        _scale(axes, floor, shown)
    set_title(figure, title)
    figure.supxlabel(notes, fontsize=9, color="0.25", ha="left", x=0.01, linespacing=1.4)
    return figure


def _by_stage(measured: Sequence[Measurement]) -> dict[str, list[Measurement]]:
    """Returns stage → its measurements, in the order of a step."""
    found = {stage: [each for each in measured if each.stage == stage] for stage in STAGES}
    return {stage: arrays for stage, arrays in found.items() if arrays}


def _floor_of(shares: Iterable[float]) -> float:
    """Returns the power of ten below all fractions of the tolerance other than 0."""
    smallest = min((share for share in shares if share > 0), default=1.0)
    return max(_FLOOR, min(1e-2, 10 ** math.floor(math.log10(min(smallest, 1.0)))))


def _draw_steps(axes: Axes, arrays: Sequence[Measurement], floor: float) -> None:
    """Draws a line over the steps for each tensor and item; wrong ones in another colour."""
    lines: dict[tuple[str, str], list[Measurement]] = {}
    for each in arrays:
        lines.setdefault((each.tensor, each.item), []).append(each)
    for line in lines.values():
        wrong = any(share_of(each) > 1 for each in line)
        look: dict[str, Any] = {"color": _WRONG if wrong else _RIGHT[0].colour}
        look |= {"linewidth": 1.6 if wrong else 1.0, "zorder": 3 if wrong else 2}
        points = [(each.step, _height(each, floor)) for each in line]
        axes.plot(*zip(*points, strict=True), alpha=0.9 if wrong else 0.4, **look)
        _mark(axes, points, floor, look["color"], "o", look["zorder"])
    axes.set_xlim(-0.4, max(each.step for each in arrays) + 0.4)


def _draw_stages(axes: Axes, measured: Named, floor: float) -> None:
    """Draws a column for each stage, with the arrays of all steps of each training."""
    stages = [
        stage for stage in STAGES if any(e.stage == stage for o in measured.values() for e in o)
    ]
    for number, (name, own) in enumerate(measured.items()):
        look = _RIGHT[number % len(_RIGHT)]
        offset = 0.5 * ((number + 1) / (len(measured) + 1) - 0.5)
        for stage, arrays in _by_stage(own).items():
            at = stages.index(stage) + offset
            # Marks on each other are drawn once.
            places = {round(math.log10(_height(each, floor)), 2) for each in arrays}
            points = [(at, 10**place) for place in places]
            axes.plot(*zip(*points, strict=True), color=look.colour, alpha=0.4)
            _mark(axes, points, floor, look.colour, look.marker, 3)
        same = sum(each.same_bits for each in own)
        label = f"{name}: {same:,} of {len(own):,} arrays bitwise equal"
        axes.plot([], [], color=look.colour, marker=look.marker, linestyle="", label=_plain(label))
    labels = [f"{stage}\n{textwrap.fill(CLAUSES[stage], 16)}" for stage in stages]
    axes.set_xticks(range(len(stages)), labels, fontsize=9)
    axes.set_xlim(-0.6, len(stages) - 0.4)
    axes.legend(
        loc="lower left", bbox_to_anchor=(-0.02, 1), fontsize=9, frameon=False, ncols=2, borderpad=0
    )


def _mark(
    axes: Axes,
    points: Sequence[tuple[float, float]],
    floor: float,
    colour: str,
    marker: str,
    zorder: float,
) -> None:
    """Draws marks: hollow for equal arrays, which have no distance, else filled."""
    for is_equal, fill in ((False, colour), (True, "white")):
        own = [point for point in points if (point[1] < floor) == is_equal]
        if own:
            axes.plot(
                *zip(*own, strict=True), marker, color=colour, markerfacecolor=fill, markersize=5,
                zorder=zorder,
            )  # fmt: skip


def _height(each: Measurement, floor: float) -> float:
    """Returns where a measurement is drawn: equal arrays below all others."""
    share = share_of(each)
    return floor / 10 if share == 0 else min(max(share, floor), _CEILING)


def _scale(axes: Axes, floor: float, shown: Sequence[Measurement]) -> None:
    """Scales the axis of differences, and draws the tolerance as a band."""
    equal = [each for each in shown if share_of(each) == 0]
    worst = min(max(map(share_of, shown)), _CEILING)
    bottom, top = floor / 30 if equal else floor, max(10.0, 10 * worst)
    axes.axhspan(bottom, 1, color=_BAND, alpha=0.13, linewidth=0)
    axes.axhline(1, color=_BAND, linewidth=1.2)
    axes.annotate(
        "\N{DOWNWARDS ARROW} rounding allows this", (1, 1), (-4, 3), fontsize=9, color="#00664B",
        xycoords=axes.get_yaxis_transform(), textcoords="offset points", ha="right", va="bottom",
    )  # fmt: skip
    axes.set_yscale("log")
    axes.set_ylim(bottom, top)
    powers = range(round(math.log10(floor)), round(math.log10(top)) + 1)
    stride = max(1, math.ceil(len(powers) / 6))
    ticks = {10.0**power: _number(10.0**power) for power in powers if power % stride == 0}
    if equal:
        is_bitwise = all(each.same_bits for each in equal)
        ticks[floor / 10] = "bitwise equal" if is_bitwise else "equal"
    axes.set_yticks(list(ticks), list(ticks.values()))
    axes.minorticks_off()  # They take half of the time of a figure.
    axes.set_ylabel("difference / allowed")
    axes.grid()


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 1 else f"{value:g}"


def _heading(name: str, stage: str, arrays: Sequence[Measurement]) -> str:
    """Returns what a panel of a wrong stage shows, from which step on, and the worst array."""
    wrong = [each for each in arrays if share_of(each) > 1]
    worst = max(wrong, key=share_of)
    share = share_of(worst)
    size = "not equal"
    if math.isfinite(share):
        size = f"{_number(float(f'{share:.2g}'))} × allowed"
    return (
        f"{name}, {stage}: {len(wrong):,} of {len(arrays):,} arrays beyond rounding;"
        f" worst: {worst.tensor}, {worst.item}, {size}"
    )


def _clean_stages(
    measured: Named, panels: Sequence[tuple[str, str, Sequence[Measurement]]]
) -> list[str]:
    """Returns a line on the stages of each training that have no panel, if others have one."""
    if not panels:
        return []
    lines = []
    for name, own in measured.items():
        wrong = [stage for each, stage, _ in panels if each == name]
        rest = [each for each in own if each.stage not in wrong]
        stages = ", ".join(dict.fromkeys(each.stage for each in rest))
        same = sum(each.same_bits for each in rest)
        which = f"other stages ({stages})" if wrong else f"all stages ({stages})"
        if rest:
            lines.append(
                f"{name}, {which}: within rounding, {same:,} of {len(rest):,} arrays bitwise equal"
            )
    return lines


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


def _notes(result: Result, letters: Sequence[str]) -> list[str]:
    """Returns the findings, the set-up and how to read the figure and the letters of its steps."""
    facts = [block for block in result.blocks if isinstance(block, Facts)]
    findings = [f"{block.title}: {block.facts['why']}" for block in facts if block.title]
    (setup,) = (block.facts for block in facts if not block.title)
    legend = (
        "Each mark is an array of a replica in a step; hollow: no difference."
        " Each step starts from the recorded state."
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
