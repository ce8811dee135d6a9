"""Defines the result of a check, and prints groups of them."""

import dataclasses
import sys
import textwrap
from collections.abc import Sequence
from typing import Any

from app.runtime import console
from app.runtime.errors import LockstepError

OK, NOTE, WARNING, ERROR = "ok", "note", "warning", "error"
_MARKS = {OK: "✓", NOTE: "·", WARNING: "!", ERROR: "✗"}
_PLAIN_MARKS = {OK: "+", NOTE: "-", WARNING: "!", ERROR: "x"}
_WIDTH, _WHAT_WIDTH = 100, 22


@dataclasses.dataclass(frozen=True)
class Check:
    """One line of the output of `doctor`.

    Attributes:
        what: what was checked.
        value: what was found.
        state: `OK`, `NOTE` for information, `WARNING` or `ERROR`.
        advice: what is required and what to do, if something is wrong.
        error: for `ERROR`, the error of a training.
    """

    what: str
    value: str
    state: str = OK
    advice: str = ""
    error: LockstepError | None = None

    @classmethod
    def of_error(cls, what: str, error: LockstepError) -> "Check":
        """Returns the check for an error that a training would exit with."""
        return cls(what, error.problem, ERROR, error.advice, error)

    @property
    def exit_code(self) -> int:
        """The exit code of a training that fails for this reason; 0 for none."""
        return self.error.exit_code if self.error else 0

    def lines(self, marks: dict[str, str] = _MARKS) -> list[str]:
        """Returns the check as lines of at most 100 columns, wrapped between words."""
        margin = " " * (_WHAT_WIDTH + 4)
        words: dict[str, Any] = {"width": _WIDTH - len(margin), "break_long_words": False}
        words |= {"break_on_hyphens": False}
        texts = textwrap.wrap(self.value, **words) or [""]
        if self.advice:
            texts += textwrap.wrap(f"→ {self.advice}", subsequent_indent="  ", **words)
        first = f"  {marks[self.state]} {self.what:<{_WHAT_WIDTH}}{texts[0]}"
        return [first.rstrip(), *(margin + text for text in texts[1:])]


def print_group(title: str, checks: Sequence[Check]) -> None:
    """Prints the checks of a group below its title."""
    encoding = getattr(sys.stdout, "encoding", None) or "ascii"
    try:
        "".join(_MARKS.values()).encode(encoding)
        marks = _MARKS
    except UnicodeEncodeError:  # The terminal cannot print the marks.
        marks = _PLAIN_MARKS
    console.say(title)
    for check in checks:
        for line in check.lines(marks):
            console.say(line)
