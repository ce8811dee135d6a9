"""Prints lines, tables and warnings, and writes all of them to log.txt.

Results are printed to standard output, warnings and errors to standard error.
"""

import contextlib
import logging
import os
import pathlib
import re
import shlex
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import NoReturn, TextIO

from app.runtime import run_context
from app.runtime.errors import INTERRUPTED_EXIT_CODE, TERMINATED_EXIT_CODE, LockstepError
from app.runtime.shown_command import shown_python

_RED, _YELLOW = "31", "33"


class _LogFile(logging.FileHandler):
    """A log file that ignores a full disk, which the failed write of a record reports."""

    def handleError(self, record: logging.LogRecord) -> None:
        pass

    def close(self) -> None:
        with contextlib.suppress(OSError):
            super().close()


def open_log(path: pathlib.Path) -> None:
    """Writes all further output of the command to `path`, too, with the time of day.

    Raises:
        OSError: the file cannot be written.
    """
    context = run_context.required()
    os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o644))
    handler = _LogFile(path, encoding="utf-8")
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    context.log.addHandler(handler)
    context.log_file = pathlib.Path(handler.baseFilename)
    context.at_end(handler.close)
    context.at_end(context.log.removeHandler, handler)


def log(text: str) -> None:
    """Writes a line only to the log."""
    _log(logging.INFO, text)


def say(text: str = "") -> None:
    """Prints a line on standard output."""
    _log(logging.INFO, text)
    _write(sys.stdout, text)


def set_overwriting(will_overwrite: bool) -> None:
    """Sets whether the run directory holds another run, which will be removed."""
    run_context.required().will_overwrite = will_overwrite


def forward_warnings(forward: Callable[[str], None]) -> None:
    """Forwards warnings to a function instead of printing them."""
    run_context.required().forward_warning = forward


def warn(text: str) -> None:
    """Prints a highlighted warning."""
    context = run_context.current()
    if context and context.forward_warning:
        context.forward_warning(text)
        return
    _log(logging.WARNING, text)
    _write(sys.stderr, _colored(f"WARNING: {text}", _YELLOW, sys.stderr))


def count(number: int, noun: str) -> str:
    """Returns "1 step", "2 steps"."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def report_error(error: LockstepError) -> int:
    """Prints the last line of a failed command and returns its exit code."""
    # One line, whatever characters a value contains.
    text = "".join(c if c.isprintable() else repr(c)[1:-1] for c in str(error))
    _write(sys.stderr, f"{_colored('error:', _RED, sys.stderr)} {text}")
    _log(logging.ERROR, str(error))
    return error.exit_code


def leave(exit_code: int, last_line: str = "") -> NoReturn:
    """Exits the process immediately, from any thread, and restores the terminal's cursor.

    Other threads continue and print until then, so that the last line is printed here.
    """
    for stream in (sys.stdout, sys.stderr):
        if stream.isatty():
            with contextlib.suppress(OSError):
                os.write(stream.fileno(), b"\033[?25h")
    with contextlib.suppress(OSError):
        os.write(2, f"{last_line}\n".encode() if last_line else b"")
    os._exit(exit_code)


def be_part() -> None:
    """Disables advice on how to resume: the parent process prints it."""
    run_context.required().is_part = True


def set_run_directory(path: pathlib.Path) -> None:
    """Sets the run directory whose log another process writes."""
    run_context.required().run_dir = path.absolute()


def report_interruption(is_interrupt: bool) -> int:
    """Prints the command that resumes, if a state was saved; returns the exit code."""
    what = "interrupted" if is_interrupt else "terminated"
    _log(logging.ERROR, what)
    context = run_context.current()
    run_dir = _run_dir(context) if context else None
    if context and context.is_part:
        _write(sys.stderr, what)
    elif run_dir and any(run_dir.glob("**/checkpoints/step-*")):
        _write(sys.stderr, f"{what}; the state is saved; resume with: {_same_command(run_dir)}")
    else:
        _write(sys.stderr, f"{what}; no state is saved yet; run the same command again")
    return INTERRUPTED_EXIT_CODE if is_interrupt else TERMINATED_EXIT_CODE


def _run_dir(context: run_context.RunContext) -> pathlib.Path | None:
    """Returns the run directory to resume; None without one."""
    run_dir = context.log_file.parent if context.log_file else context.run_dir
    if run_dir is None or context.will_overwrite:
        return None
    with contextlib.suppress(OSError, ValueError):  # The current directory may have been removed.
        return pathlib.Path(os.path.relpath(run_dir))
    return run_dir


def _same_command(run_dir: pathlib.Path) -> str:
    """Returns the command line that resumes a run, quoted for a shell."""
    words = [word for word in sys.argv if word.lstrip("-").partition("=")[0] != "overwrite"]
    if not any(word.lstrip("-").partition("=")[0] == "out" for word in words):
        words.append(f"--out={run_dir}")
    return shlex.join([shown_python(), *words])


def report_bug(error: Exception) -> int:
    """Writes the traceback to the log, or to standard error without one; returns 1."""
    text = "".join(traceback.format_exception(error))
    context = run_context.current()
    log_file = context.log_file if context else None
    if log_file:
        _log(logging.ERROR, text)
    else:
        _write(sys.stderr, text.rstrip())
    first_line = (str(error).splitlines() or [""])[0]
    where = f"the traceback is in {log_file}" if log_file else "the traceback is above"
    _write(sys.stderr, f"error: a bug ({type(error).__name__}: {first_line}); {where}")
    return 1


def _log(level: int, text: str) -> None:
    """Writes to the log of the command; outside of a command, does nothing."""
    context = run_context.current()
    if context:
        context.log.log(level, "%s", text)


def _write(stream: TextIO, text: str) -> None:
    """Prints and flushes; a closed pipe (`| head -1`) must not stop a training."""
    try:
        print(text, file=stream, flush=True)
    except OSError:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)


def _colored(text: str, color: str, stream: TextIO) -> str:
    """Returns the text in bold and a color if the stream is a terminal."""
    return f"\033[1;{color}m{text}\033[0m" if stream.isatty() else text


def is_numeric(cells: Sequence[str]) -> bool:
    """Returns whether all cells of a column are dashes or begin with a number: align right."""
    return all(re.match(r"–?$|[-+±<≤✗≠ ]*[0-9]", cell) for cell in cells)


def print_table(title: str, header: list[str], rows: list[list[str]]) -> None:
    """Prints a table; names are aligned left, numbers right."""
    import rich.box
    import rich.console
    import rich.table

    table = rich.table.Table(box=rich.box.SIMPLE_HEAD)
    for position, (name, *cells) in enumerate(zip(header, *rows, strict=True)):
        is_name = position == 0 or not is_numeric(cells)
        table.add_column(name, justify="left" if is_name else "right", overflow="fold")
    for row in rows:
        table.add_row(*row)
    # A pipe has no width: nothing is wrapped, so that programs can read the rows.
    console = rich.console.Console(width=None if sys.stdout.isatty() else 1000, color_system=None)
    say(title)
    with console.capture() as capture:
        console.print(table)
    for line in capture.get().rstrip("\n").split("\n"):
        if line.strip():
            say(line.rstrip())
