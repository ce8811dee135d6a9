"""Checks the types of values in JSON text from another program."""

import json
from typing import Any

_MAX_DEPTH = 50
_MAX_TEXT = 2_000
_MAX_SHOWN = 60


class TraceError(ValueError):
    """An error in a trace, with advice; the file's name is prepended."""


def parse_json(text: str) -> Any:
    """Parses JSON text.

    Raises:
        TraceError: the text is not JSON, or is nested too deeply.
    """
    try:
        return json.loads(text)
    except RecursionError as error:
        raise TraceError("has an 'about' that is nested too deeply; record it again") from error
    except ValueError as error:
        raise TraceError("has an 'about' that is not JSON text; record it again") from error


def check_tree(root: Any) -> None:
    """Checks depth, texts and integers of a JSON value, without recursion."""
    nodes = [(root, 0)]
    while nodes:
        node, depth = nodes.pop()
        if depth > _MAX_DEPTH:
            raise TraceError("has an 'about' that is nested too deeply; record it again")
        if isinstance(node, dict):
            for key in node:
                _check_text(key)
            nodes.extend((child, depth + 1) for child in node.values())
        elif isinstance(node, list):
            nodes.extend((child, depth + 1) for child in node)
        elif isinstance(node, str):
            _check_text(node)
        elif type(node) is int and not -(2**64) < node < 2**64:
            raise TraceError("has a number of more than 64 bits in 'about'; record it again")


def _check_text(text: str) -> None:
    if len(text) > _MAX_TEXT or not text.isprintable():
        raise TraceError(
            f"has the text {shown(text)} in 'about'; names and other texts must be printable"
            f" and have at most {_MAX_TEXT:,} characters"
        )


def mapping_of(value: Any, key: str) -> dict[str, Any]:
    """Returns a value that must be an object."""
    if not isinstance(value, dict):
        raise wrong_value(key, value, "an object")
    return value


def text_of(value: Any, key: str) -> str:
    """Returns a value that must be a text."""
    if not isinstance(value, str):
        raise wrong_value(key, value, "a text")
    return value


def texts_of(value: Any, key: str) -> tuple[str, ...]:
    """Returns a value that must be a list of texts."""
    if not isinstance(value, list):
        raise wrong_value(key, value, "a list")
    return tuple(text_of(item, f"{key}[{i}]") for i, item in enumerate(value))


def int_of(value: Any, key: str, low: int, high: int) -> int:
    """Returns a value that must be an integer from `low` to `high`."""
    if type(value) is not int or not low <= value <= high:
        raise wrong_value(key, value, f"a whole number from {low} to {high}")
    return value


def wrong_value(key: str, value: Any, required: str) -> TraceError:
    """Returns the error for a missing or invalid value."""
    found = "is missing" if value is None else f"is {shown(value)}"
    return TraceError(f"{shown(key)[1:-1]} of 'about' {found}, must be {required}; record it again")


def shown(value: Any) -> str:
    """Formats a value from a file as short, printable text."""
    if isinstance(value, dict):
        return "an object"
    if isinstance(value, list):
        return f"a list of {len(value)}"
    text = repr(value[:_MAX_SHOWN]) if isinstance(value, str) else repr(value)
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}…"


def printable(text: str) -> str:
    """Returns text as one printable line."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)
