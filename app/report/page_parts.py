"""What a page of a report is made of: plain data for the template, all text as it is shown."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import TypeGuard


@dataclasses.dataclass(frozen=True)
class Cell:
    """One cell of a table.

    Attributes:
        text: what it shows.
        mark: "differs", "good" or "bad", "" for none.
        title: the whole of what is shown shortened.
    """

    text: str
    mark: str = ""
    title: str = ""


@dataclasses.dataclass(frozen=True)
class Table:
    """A table whose first column names its rows.

    Attributes:
        caption: what it shows.
        header: name of each column.
        align: a letter for each column: "l" for text, "w" for text of several lines, "r" for
            numbers.
        rows: a cell for each column; a plain text stands for an unmarked cell.

    Raises:
        TypeError: a cell holds anything but text.
        ValueError: a row has another number of cells.
    """

    caption: str
    header: Sequence[str]
    align: str
    rows: Sequence[Sequence[Cell | str]]
    kind = "table"

    def __post_init__(self) -> None:
        for row in self.rows:
            if not len(row) == len(self.header) == len(self.align):
                raise ValueError(f"{len(row)} cells in a row of {len(self.header)}")
            for cell in row:
                text = cell.text if isinstance(cell, Cell) else cell
                if not isinstance(text, str):
                    raise TypeError(f"{text!r:.80} in place of a text")


@dataclasses.dataclass(frozen=True)
class Text:
    """A paragraph."""

    text: str
    kind = "text"


@dataclasses.dataclass(frozen=True)
class Heading:
    """A title within a section."""

    text: str
    kind = "heading"


@dataclasses.dataclass(frozen=True)
class Items:
    """A list of sentences; "bad", "differs" and "good" mark what was found."""

    items: Sequence[str]
    mark: str = ""
    kind = "items"


@dataclasses.dataclass(frozen=True)
class Facts:
    """A title, and what is known about it.

    Attributes:
        title: a line.
        facts: name → text.
        mark: "bad", "differs" or "good", "" for none.
    """

    title: str
    facts: Mapping[str, str]
    mark: str = ""
    kind = "facts"


@dataclasses.dataclass(frozen=True)
class Details:
    """What is shown when it is asked for."""

    title: str
    blocks: Sequence
    kind = "details"


@dataclasses.dataclass(frozen=True)
class Section:
    """A part of the page with a title of its own.

    Attributes:
        id: for links to it.
        title: its heading.
        blocks: what is in it, in order.
    """

    id: str
    title: str
    blocks: Sequence


@dataclasses.dataclass(frozen=True)
class Part:
    """What one record on disk says.

    Attributes:
        label: the name of its directory.
        blocks: what is shown of it.
        caveats: what a reader must not miss.
        environment: what its numbers depend on, by name.
        changes: what was changed on the way.
        verdicts: the verdict in one or several sentences.
    """

    label: str
    blocks: Sequence
    caveats: Sequence[str]
    environment: dict[str, str]
    changes: Sequence[str] = ()
    verdicts: Sequence[Items] = ()


def number(value: float | None, form: str = ",.0f", unit: str = "") -> str:
    """Formats a number; a dash where there is none."""
    if value is None:
        return "–"
    return f"{float(value):{form}}{unit}"


def whole(value: int | None) -> str:
    """Formats a whole number, a dash where there is none."""
    return "–" if value is None else f"{int(value):,}"


def is_finite(value: float | None) -> TypeGuard[float]:
    """Tells whether a number can be drawn."""
    return value is not None and math.isfinite(value)


def count(number_of: int, noun: str) -> str:
    """Returns "1 step", "2 steps"."""
    return f"{number_of} {noun}" + ("s" if number_of != 1 else "")


def devices_text(devices: Sequence[str], simulated: bool) -> str:
    """Returns "1 CPU", "2 simulated CPUs", "4 GPUs"."""
    kind = "GPU" if devices and "GPU" in devices[0] else "CPU"
    return count(len(devices), f"{'simulated ' if simulated else ''}{kind}")


def differing(
    labels: Sequence[str], fields: Sequence[dict[str, str]]
) -> tuple[dict[str, str], list[str], list[list[Cell | str]]]:
    """Splits fields into those that are the same in all and those that are not.

    Returns:
        The first with their value; the names of the others; a row with these for each label, what
        is not as in the first row being marked.
    """
    names = list(dict.fromkeys(name for each in fields for name in each))
    values = [{name: each.get(name, "–") for name in names} for each in fields]
    same = {name: values[0][name] for name in names if len({each[name] for each in values}) == 1}
    others = [name for name in names if name not in same]
    rows: list[list[Cell | str]] = [
        [label, *(Cell(each[n], "differs" * (each[n] not in (values[0][n], "–"))) for n in others)]
        for label, each in zip(labels, values, strict=True)
    ]
    return same, others, rows
