"""Prints the parts of an experiment: introduction, tables, conclusions and next commands."""

import textwrap
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike

from app.devices.device_setup import Devices
from app.performance.interval import Interval
from app.records.caveats import TIMING_CAVEAT
from app.runtime import console
from app.runtime.shown_command import shown_command

if TYPE_CHECKING:  # Not imported before its devices are set up.
    import tensorflow as tf

_WIDTH = 98


def say(text: str) -> None:
    """Prints a wrapped paragraph."""
    console.say(textwrap.fill(text, _WIDTH))


def begin(text: str, devices: Devices | None = None) -> None:
    """Prints the purpose of the experiment and its devices."""
    say(text)
    if devices:
        simulated = f" ({TIMING_CAVEAT})" if devices.simulated else ""
        names = ", ".join(devices.names[:4]) + (", …" if len(devices.names) > 4 else "")
        say(f"{console.count(len(devices.names), 'device')}: {names}{simulated}")
    console.say()


def show(
    title: str, header: list[str], rows: Iterable[Iterable], *, simulated: bool = False
) -> None:
    """Prints a table; a table of times has a note if devices share a processor."""
    title = f"{title} ({TIMING_CAVEAT})" if simulated else title
    console.print_table(title, header, [[str(cell) for cell in row] for row in rows])
    console.say()


def end(*lessons: str, then: Iterable[str] = ()) -> None:
    """Prints the conclusions of an experiment, one paragraph each, and the next commands to try."""
    for lesson in lessons:
        say(lesson)
    console.say()
    for number, words in enumerate(then):
        console.say(f"{'Try:' if number == 0 else '    '} {shown_command([])} {words}")


def numbers(array: ArrayLike, digits: int = 4) -> str:
    """Returns an array as one line, in NumPy's format."""
    form: Any = {"float_kind": lambda x: f"{x:.{digits}f}"} if digits else None
    text = np.array2string(np.asarray(array), formatter=form, max_line_width=10_000)
    return text.replace("\n", "")


def device_of(tensor: "tf.Tensor") -> str:
    """Returns the actual device of a tensor, such as "/device:CPU:1"."""
    return "/device:" + tensor.device.rpartition("device:")[2]


def whole(interval: Interval) -> str:
    """Returns an interval of large numbers as text without decimals."""
    return f"{interval.value:,.0f} ({interval.low:,.0f}–{interval.high:,.0f})"
