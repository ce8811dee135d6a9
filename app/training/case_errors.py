"""Describes errors in the code of a case in one line: file, line and reason."""

import pathlib
import re
import traceback

from app.runtime.errors import reason_of

_IN_TEXT = re.compile(r'File "([^"]+)", line (\d+)')
_ESCAPES = re.compile(r"\x1b\[[0-9;]*m")  # Keras prints in bold.
# Lines that TensorFlow and Keras add around the reason of an error in traced code or a graph.
_AROUND = re.compile(
    r'in user code:|Graph execution error:|Detected at node|<stack traces|File "'
    r"|(\w+: )?Exception encountered when calling"
)
_SOURCE_INDENT = " " * 8  # Indentation of the quoted source lines.
_OF_TENSORFLOW = re.compile(
    r"^\{\{function_node \S+\}\} |^assertion failed: \[|\] \[Condition .*$|\s*\[Op:\S+\].*$"
)


def describe_error(error: BaseException, path: pathlib.Path, what: str) -> str:
    """Returns file and line of a case, the moment of the error, and its reason.

    Args:
        error: raised by code that a case defines, calls or passes to Keras.
        path: resolved path of the case.
        what: moment of the error, for example "in model()".
    """
    return f"{_place(error, path)} {what}: {type(error).__name__}: {_reason(error)}"


def is_installed(file: str) -> bool:
    """Returns whether a file belongs to an installed package."""
    return bool({"site-packages", "dist-packages"} & set(pathlib.Path(file).parts))


def _place(error: BaseException, path: pathlib.Path) -> str:
    """Returns file and line of the innermost stack frame in the folder of the case."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{pathlib.Path(error.filename).name}:{error.lineno}:"
    own = _own_lines(error, path)
    return f"{pathlib.Path(own[-1][0]).name}:{own[-1][1]}:" if own else path.name


def _own_lines(error: BaseException, path: pathlib.Path) -> list[tuple[str, int]]:
    """Returns the lines of the case's folder in the traceback or in the message of an error."""
    frames = traceback.extract_tb(error.__traceback__)
    lines = [(frame.filename, frame.lineno or 0) for frame in frames]
    lines += [(file, int(number)) for file, number in _IN_TEXT.findall(str(error))]
    return [
        (file, number) for file, number in lines
        if pathlib.Path(file).resolve().is_relative_to(path.parent) and not is_installed(file)
    ]  # fmt: skip


def _reason(error: BaseException) -> str:
    """Returns the line of an error message with the reason."""
    if isinstance(error, OSError | KeyError):
        return reason_of(error)
    told = [
        line.strip() for line in _ESCAPES.sub("", str(error)).splitlines()
        if line.strip() and not line.startswith(_SOURCE_INDENT) and not _AROUND.match(line.strip())
    ]  # fmt: skip
    line = _OF_TENSORFLOW.sub("", told[0]) if told else ""
    return reason_of(Exception(line.removeprefix(f"{type(error).__name__}: "))) if line else ""
