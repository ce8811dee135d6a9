"""Defines a row of the table of options, and how its value is parsed and checked."""

import dataclasses
import difflib
import types
import typing
from collections.abc import Iterable
from typing import Any

from absl import flags

from app.runtime.errors import ConfigError


@dataclasses.dataclass(frozen=True)
class Option:
    """A row of the table: one option of one or several commands.

    Attributes:
        default: the default.
        help: text for `--help`.
        commands: the commands that have the option.
        choices: the allowed values; empty for any.
        bounds: the smallest and the largest allowed whole number; a number that is not whole must
            exceed the first.
        metavar: what stands for a value of text in `--help`, for example `DIR`.
        alias: another name of the flag.
        required: whether the command needs a value.
        is_word: whether the value is the words after the command instead of a flag.
        repeats: whether a list may contain a value more than once.
        affects_result: whether the result of a training depends on it, so that another value is
            another run.
        name, group: name of the flag and of the field, and of the group that has it.
        kind: `int`, `float`, `str` or `bool`; for a list, the type of its items.
        is_list: whether it takes several values, separated by commas.
        optional: whether it may be None.
    """

    default: Any
    help: str
    commands: tuple[str, ...]
    choices: tuple[str, ...] = ()
    bounds: tuple[int, float] | None = None
    metavar: str = ""
    alias: str = ""
    required: bool = False
    is_word: bool = False
    repeats: bool = False
    affects_result: bool = False
    name: str = ""
    group: str = ""
    kind: type = str
    is_list: bool = False
    optional: bool = False

    @property
    def flag(self) -> str:
        """The option without a value."""
        return self.name if self.is_word else f"--{self.name}"

    @property
    def placeholder(self) -> str:
        """What stands for the value in `--help`; "" for a switch."""
        if self.is_list and not self.metavar:
            return "A,B,…" if self.choices else "N,N,…"
        of_kind = {int: "N", float: "X", str: "|".join(self.choices), bool: ""}
        return self.metavar or of_kind[self.kind]

    @property
    def expected(self) -> str:
        """The allowed values, for an error message."""
        if self.choices:
            return f"one of {', '.join(self.choices)}"
        if self.kind is bool:
            return "true or false"
        if self.bounds is None:
            return "names separated by commas" if self.is_list else "text"
        low, high = self.bounds
        if self.kind is float:
            return f"a number above {low}, at most {high:g}"
        if self.is_list:
            return f"whole numbers between {low} and {high}, separated by commas"
        return f"a whole number between {low} and {high}"

    def parse(self, value: Any) -> Any:
        """Returns the value of the text of a flag, or of a keyword argument.

        Raises:
            ConfigError: the value is invalid; the message names the flag and the value.
        """
        if value is None and self.optional:
            return None
        if value == "" or (self.is_list and not value and self.default):
            shown = f"{self.flag}={self.placeholder or 'true'}"
            raise ConfigError(f"{self.flag} has no value; write {shown}")
        if not self.is_list:
            return self._parse_item(value, value)
        items = value.split(",") if isinstance(value, str) else value
        if not isinstance(items, list | tuple) or "" in items:
            raise ConfigError(f"{self.flag} must be {self.expected}, got {value!r}")
        shown = ",".join(map(str, items))
        parsed = tuple(self._parse_item(item, item if self.choices else shown) for item in items)
        if len(set(parsed)) != len(parsed) and not self.repeats:
            raise ConfigError(f"{self.flag} must name each value once, got {shown}")
        return parsed

    def _parse_item(self, item: Any, shown: Any) -> Any:
        try:
            return self._parser().parse(item)
        except (TypeError, ValueError, OverflowError):
            text = repr(shown).strip("'") if self.kind in (int, float) else repr(shown)
            nearest = did_you_mean(str(item), self.choices)
            raise ConfigError(f"{self.flag} must be {self.expected}, got {text}{nearest}") from None

    def _parser(self) -> Any:
        """Returns absl's parser of a value, or of an item of a list."""
        if self.choices:
            return flags.EnumParser(list(self.choices))
        if self.kind is float:
            return _AboveParser(*(self.bounds or ()))
        if self.kind is int:
            return flags.IntegerParser(*(self.bounds or ()))
        return flags.BooleanParser() if self.kind is bool else flags.ArgumentParser()


class _AboveParser(flags.FloatParser):
    """Parses a number with an open lower bound; refuses NaN."""

    def is_outside_bounds(self, val: float) -> bool:
        return not self.lower_bound < val <= self.upper_bound  # type: ignore[operator]


def option(default: Any, help: str, commands: tuple[str, ...], **attributes: Any) -> Any:
    """Returns the field of a group for an option; see `Option` for the attributes."""
    row = Option(default, help, commands, **attributes)
    return dataclasses.field(default=default, metadata={"option": row})


def rows_of(group: str, group_class: type) -> list[Option]:
    """Returns the options of a group, with their types."""
    rows = []
    for name, hint in typing.get_type_hints(group_class).items():
        optional = isinstance(hint, types.UnionType)
        inner = typing.get_args(hint)[0] if optional else hint
        is_list = typing.get_origin(inner) is tuple
        kind = typing.get_args(inner)[0] if is_list else inner
        row = group_class.__dataclass_fields__[name].metadata["option"]  # type: ignore[attr-defined]
        types_of = {"kind": kind, "is_list": is_list, "optional": optional}
        rows.append(dataclasses.replace(row, name=name, group=group, **types_of))
    return rows


def shown_flag(name: str, value: Any) -> str:
    """Returns an option as it is written on the command line."""
    if value is True:
        return f"--{name}"
    return f"--{name}={','.join(map(str, value)) if isinstance(value, tuple | list) else value}"


def did_you_mean(word: str, known: Iterable[str], prefix: str = "") -> str:
    """Returns "; did you mean …?" with the nearest known word, or ""."""
    nearest = difflib.get_close_matches(word, known, n=1)
    return f"; did you mean {prefix}{nearest[0]}?" if nearest else ""
