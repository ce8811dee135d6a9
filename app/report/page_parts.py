"""Defines the parts of a report's page as plain data for the template."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import TypeGuard


@dataclasses.dataclass(frozen=True)
class Cell:
    """One cell of a table.

    Attributes:
        text: displayed text.
        mark: "differs", "good" or "bad"; "" for none.
        title: full text, if the displayed text is shortened.
    """

    text: str
    mark: str = ""
    title: str = ""


@dataclasses.dataclass(frozen=True)
class Table:
    """A table whose first column names its rows.

    Attributes:
        caption: caption of the table.
        header: name of each column.
        align: one letter per column: "l" for text, "w" for text of several lines, "r" for numbers.
        rows: one cell per column; a string is an unmarked cell.

    Raises:
        TypeError: a cell is not text.
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
    """A list of sentences; "bad", "differs" and "good" mark findings."""

    items: Sequence[str]
    mark: str = ""
    kind = "items"


@dataclasses.dataclass(frozen=True)
class Facts:
    """A title with facts.

    Attributes:
        title: title line.
        facts: name → text.
        mark: "bad", "differs" or "good"; "" for none.
    """

    title: str
    facts: Mapping[str, str]
    mark: str = ""
    kind = "facts"


@dataclasses.dataclass(frozen=True)
class Details:
    """Content that is collapsed at first."""

    title: str
    blocks: Sequence
    kind = "details"


@dataclasses.dataclass(frozen=True)
class Section:
    """A section of the page with a heading.

    Attributes:
        id: target of links.
        title: heading.
        blocks: contents, in order.
    """

    id: str
    title: str
    blocks: Sequence


@dataclasses.dataclass(frozen=True)
class Part:
    """The contents of one record on disk.

    Attributes:
        label: name of its directory.
        blocks: contents to show.
        caveats: caveats of its results.
        environment: name → value of what its numbers depend on.
        changes: changes of flags on resuming.
        verdicts: the verdict in one or several sentences.
    """

    label: str
    blocks: Sequence
    caveats: Sequence[str]
    environment: dict[str, str]
    changes: Sequence[str] = ()
    verdicts: Sequence[Items] = ()


def number(value: float | None, form: str = ",.0f", unit: str = "") -> str:
    """Formats a number; a dash for None."""
    if value is None:
        return "–"
    return f"{float(value):{form}}{unit}"


def whole(value: int | None) -> str:
    """Formats an integer; a dash for None."""
    return "–" if value is None else f"{int(value):,}"


def is_finite(value: float | None) -> TypeGuard[float]:
    """Returns whether a number can be drawn."""
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
    """Splits fields into equal and differing ones.

    Returns:
        The equal fields with their value; the names of the others; and a row of them per label, in
        which values that differ from the first row are marked.
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
