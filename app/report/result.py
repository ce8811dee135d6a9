"""Defines the result of a command in words and tables: the console prints it, the page shows it."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from app.runtime import console
from lockstep.answer.text import facts_lines


@dataclasses.dataclass(frozen=True)
class Table:
    """A table; the first column names the rows, all cells are text."""

    title: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]

    @property
    def numeric(self) -> list[bool]:
        """Whether each column holds numbers, which are aligned right."""
        columns = zip(self.header, *self.rows, strict=True)
        return [console.is_numeric(cells) for _, *cells in columns]


@dataclasses.dataclass(frozen=True)
class Facts:
    """A title, which may be empty, and named facts."""

    title: str
    facts: Mapping[str, str]


Block = str | Table | Facts  # A text is a line; "" is an empty line.


@dataclasses.dataclass(frozen=True)
class Result:
    """The result of a command.

    Attributes:
        verdicts: kind of each verdict, as of `lockstep.answer.html.kind_of`, and its sentence.
        blocks: lines, tables and facts, in order.
        caveats: what makes the result differ from what a reader would expect.
    """

    verdicts: Sequence[tuple[str, str]] = ()
    blocks: Sequence[Block] = ()
    caveats: Sequence[str] = ()

    def print(self) -> None:
        """Prints verdicts and blocks on standard output, and caveats as warnings."""
        for _, sentence in self.verdicts:
            console.say(sentence)
        for block in self.blocks:
            if isinstance(block, str):
                console.say(block)
            elif isinstance(block, Table):
                console.say()
                console.print_table(block.title, list(block.header), [[*r] for r in block.rows])
            else:
                console.say()
                for line in facts_lines(block.title, block.facts):
                    console.say(line)
        for caveat in self.caveats:
            console.warn(caveat)

    def to_record(self) -> dict[str, Any]:
        """Returns the result for a JSON file."""
        return dataclasses.asdict(self)

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> "Result":
        """Reads a result from a JSON file.

        Raises:
            AttributeError, KeyError, TypeError, ValueError: it is damaged.
        """
        verdicts = [(str(status), str(sentence)) for status, sentence in record["verdicts"]]
        blocks = [_block(each) for each in record["blocks"]]
        return cls(verdicts, blocks, [str(each) for each in record["caveats"]])


def _block(record: Any) -> Block:
    if isinstance(record, str):
        return record
    title = str(record["title"])
    if "facts" in record:
        return Facts(title, {str(name): str(text) for name, text in record["facts"].items()})
    header, *rows = [[str(cell) for cell in row] for row in [record["header"], *record["rows"]]]
    if any(len(row) != len(header) for row in rows):
        raise ValueError("a row with another number of cells than the header")
    return Table(title, header, rows)
