"""Command lines as they are printed: they run as they stand, with the interpreter in use."""

import os
import pathlib
import shlex
import shutil
import sys
from collections.abc import Iterable

_MAIN = pathlib.Path(__file__).parents[2] / "main.py"


def shown_command(words: Iterable[str]) -> str:
    """Returns the command line of this program with a command and flags, as a shell takes it."""
    return shlex.join([shown_python(), shown_path(str(_MAIN)), *words])


def shown_python() -> str:
    """Returns how to call this Python: `python` if that is this one, else its path."""
    # Not by what links lead to: that is the same Python for every virtual environment.
    return "python" if shutil.which("python") == sys.executable else shown_path(sys.executable)


def shown_path(path: str) -> str:
    """Returns a path relative to the current directory if it is below it, else the full path."""
    try:
        relative = os.path.relpath(path)
    except OSError:  # The current directory is gone.
        return path
    return os.path.abspath(path) if relative.startswith("..") else relative
