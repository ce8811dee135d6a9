"""Defines options as dataclass fields with metadata.

Type and default are those of the field; help, group, choices and bounds are its metadata. Flags,
`--help`, `Config.of`, the validation of values and `docs/options.md` are generated from the fields.
"""

import dataclasses
import difflib
import types
import typing
from collections.abc import Iterable
from typing import Any

from app.runtime.errors import ConfigError

_KEY = "option"
_UNSET: Any = object()


@dataclasses.dataclass(frozen=True)
class Option:
    """The metadata of an option.

    Attributes:
        help: text for `--help`.
        group: title of the option's group.
        metavar: placeholder for the value, for example `N`; "" for the choices.
        choices: the allowed values; empty for any.
        low: the smallest allowed number; None for any.
        high: the largest allowed number; None for any.
        above: a number that the value must exceed; None for none.
        alias: another name of the flag.
        required: whether the command needs a value.
        positional: whether the value is the words after the command instead of a flag.
        affects_result: whether the result of a training depends on the option, so that another
            value is another run.
        repeats: whether a list may contain a value more than once.
    """

    help: str
    group: str
    metavar: str = ""
    choices: tuple[str, ...] = ()
    low: float | None = None
    high: float | None = None
    above: float | None = None
    alias: str = ""
    required: bool = False
    positional: bool = False
    affects_result: bool = False
    repeats: bool = False


def option(default: Any, help: str, group: str, **metadata: Any) -> Any:
    """Returns a dataclass field with the metadata of an option.

    Args:
        default: default of the field.
        help: see `Option`.
        group: title of the group.
        **metadata: other attributes of `Option`.
    """
    return dataclasses.field(default=default, metadata={_KEY: Option(help, group, **metadata)})


def same_option(group: type, name: str, *, default: Any = _UNSET, **changes: Any) -> Any:
    """Returns a copy of an option's field in another dataclass, with changes.

    Args:
        group: the dataclass.
        name: name of the field.
        default: another default, if given.
        **changes: other attributes of `Option`.
    """
    field = group.__dataclass_fields__[name]  # type: ignore[attr-defined]  # `type` has none.
    metadata = dataclasses.replace(field.metadata[_KEY], **changes)
    return dataclasses.field(
        default=field.default if default is _UNSET else default, metadata={_KEY: metadata}
    )


@dataclasses.dataclass(frozen=True)
class BoundOption:
    """An option of one command, with its type.

    Attributes:
        name: name of the field and of the flag.
        kind: `int`, `float`, `str` or `bool`; for a list, the type of its items.
        is_list: whether it takes several values.
        optional: whether it may be None.
        default: the default.
        metadata: the metadata of the field.
    """

    name: str
    kind: type
    is_list: bool
    optional: bool
    default: Any
    metadata: Option

    @property
    def flag(self) -> str:
        """The flag without a value."""
        return self.name if self.metadata.positional else f"--{self.name}"

    @property
    def metavar(self) -> str:
        """The placeholder for the value; "" for a switch."""
        return self.metadata.metavar or "|".join(self.metadata.choices)

    def parse(self, text: str) -> Any:
        """Parses the text of a flag.

        Raises:
            ConfigError: the text does not have the option's type.
        """
        if text == "":
            raise ConfigError(f"{self.flag} has no value; write {self.flag}={self.metavar}")
        if self.is_list:
            return tuple(self._parse_item(item, text) for item in text.split(","))
        return self._parse_item(text, text)

    def _parse_item(self, item: str, text: str) -> Any:
        try:
            return self.kind(item)
        except ValueError:
            raise ConfigError(f"{self.flag} must be {self.expected}, got {text!r}") from None

    @property
    def expected(self) -> str:
        """The expected values, for an error message."""
        one, many = {
            int: ("a whole number", "whole numbers"),
            float: ("a number", "numbers"),
            bool: ("true or false", ""),
            str: ("text", "names"),
        }[self.kind]
        return f"{many} separated by commas" if self.is_list else one

    def check(self, value: Any) -> None:
        """Checks the type, the choices and the bounds of a value.

        Raises:
            ConfigError: the value is invalid; the message names the flag and the value.
        """
        if value is None and self.optional:
            return
        if self.metadata.required and value in ("", None):
            raise ConfigError(f"{self.flag} is required; write {self.flag}={self.metavar}")
        if value == "" and self.default is None:
            raise ConfigError(f"{self.flag} has no value; write {self.flag}={self.metavar}")
        if self.is_list and isinstance(value, tuple):
            if not value and self.default:
                raise ConfigError(f"{self.flag} must have at least one value, got none")
            if "" in value:
                raise ConfigError(
                    f"{self.flag} has an empty value; write {self.flag}={self.metavar}"
                )
        items = value if self.is_list else (value,)
        if not isinstance(items, tuple) or not all(map(self._has_kind, items)):
            shown = ",".join(map(str, value)) if isinstance(value, tuple) else value
            raise ConfigError(f"{self.flag} must be {self.expected}, got {shown!r}")
        for item in items:
            self._check_item(item)
        if len(set(items)) != len(items) and not self.metadata.repeats:
            shown = ",".join(map(str, items))
            raise ConfigError(f"{self.flag} must name each value once, got {shown}")

    def _has_kind(self, item: Any) -> bool:
        if self.kind is float:
            return isinstance(item, int | float) and not isinstance(item, bool)
        return isinstance(item, self.kind) and (self.kind is bool or not isinstance(item, bool))

    def _check_item(self, item: Any) -> None:
        choices, low, high = self.metadata.choices, self.metadata.low, self.metadata.high
        if choices and item not in choices:
            raise ConfigError(
                f"{self.flag} must be one of {', '.join(choices)}, got {item!r}"
                f"{did_you_mean(str(item), choices)}"
            )
        if self.metadata.above is not None and not item > self.metadata.above:
            raise ConfigError(f"{self.flag} must be above {self.metadata.above:g}, got {item}")
        above_low = low is None or item >= low
        below_high = high is None or item <= high
        if not (above_low and below_high):
            bounds = f"between {low} and {high}"
            if low is None or high is None:
                bounds = f"at most {high}" if low is None else f"at least {low}"
            raise ConfigError(f"{self.flag} must be {bounds}, got {item}")


def options_of(config: Any) -> list[BoundOption]:
    """Returns the options of a dataclass, or of an instance of it.

    Options of its first base class come first, in the order of the source.
    """
    config_class = config if isinstance(config, type) else type(config)
    hints = typing.get_type_hints(config_class)
    fields = {f.name: f for f in dataclasses.fields(config_class) if _KEY in f.metadata}
    order = dict.fromkeys(
        n for c in config_class.__mro__ for n in vars(c).get("__annotations__", ())
    )
    return [
        BoundOption(name, *_kind_of(hints[name]), fields[name].default, fields[name].metadata[_KEY])
        for name in order
        if name in fields
    ]


def _kind_of(hint: Any) -> tuple[type, bool, bool]:
    """Returns the value type of an annotation, whether it is a list, and whether it is optional."""
    arguments = typing.get_args(hint)
    if isinstance(hint, types.UnionType):
        (inner,) = (a for a in arguments if a is not type(None))
        kind, is_list, _ = _kind_of(inner)
        return kind, is_list, True
    if typing.get_origin(hint) is tuple:
        return arguments[0], True, False
    return hint, False, False


def check_values(config: Any) -> None:
    """Checks the value of each option of a config.

    Raises:
        ConfigError: a value is invalid.
    """
    for each in options_of(config):
        each.check(getattr(config, each.name))


def did_you_mean(word: str, known: Iterable[str], prefix: str = "") -> str:
    """Returns "; did you mean …?" with the nearest known word, or ""."""
    nearest = difflib.get_close_matches(word, known, n=1)
    return f"; did you mean {prefix}{nearest[0]}?" if nearest else ""
