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
from collections.abc import Callable, Iterator, Sequence
from typing import NoReturn, TextIO

from app.runtime.errors import (
    INTERRUPTED_EXIT_CODE,
    TERMINATED_EXIT_CODE,
    LockstepError,
    Terminated,
    expected_error,
)
from app.runtime.shown_command import shown_path, shown_python

# Set for a process whose parent is this program, too; the parent prints the command that resumes.
PART_VARIABLE = "LOCKSTEP_PART"
_RED, _YELLOW = "31", "33"


class _LogFile(logging.FileHandler):
    """A log file that ignores a full disk, which the failed write of a record reports."""

    def handleError(self, record: logging.LogRecord) -> None:
        pass

    def close(self) -> None:
        with contextlib.suppress(OSError):
            super().close()


class _Forwarded(logging.Handler):
    """Hands each warning to a function."""

    def __init__(self, forward: Callable[[str], None]):
        super().__init__(logging.WARNING)
        self._forward = forward

    def emit(self, record: logging.LogRecord) -> None:
        self._forward(record.getMessage())


def open_log(path: pathlib.Path) -> None:
    """Writes all further output of this process to `path`, too, with the time of day.

    Raises:
        OSError: the file cannot be written.
    """
    os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o644))
    handler = _LogFile(path, encoding="utf-8")
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    _logger().addHandler(handler)


def log_file() -> pathlib.Path | None:
    """Returns the path of the log; None without one."""
    handlers = _logger().handlers
    return next((pathlib.Path(h.baseFilename) for h in handlers if isinstance(h, _LogFile)), None)


def log(text: str) -> None:
    """Writes a line only to the log."""
    _log(logging.INFO, text)


def say(text: str = "") -> None:
    """Prints a line on standard output."""
    _log(logging.INFO, text)
    _write(sys.stdout, text)


def forward_warnings(forward: Callable[[str], None]) -> None:
    """Forwards warnings to a function instead of printing them."""
    _logger().addHandler(_Forwarded(forward))


def warn(text: str) -> None:
    """Prints a highlighted warning."""
    _log(logging.WARNING, text)
    if not any(isinstance(handler, _Forwarded) for handler in _logger().handlers):
        _write(sys.stderr, _colored(f"WARNING: {text}", _YELLOW, sys.stderr))


def count(number: int, noun: str) -> str:
    """Returns "1 step", "2 steps"."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def report_error(error: Exception) -> int:
    """Prints the last line of a failed command and returns its exit code.

    The traceback of an unexpected exception is written to the log, or printed without one.
    """
    expected, path = expected_error(error), log_file()
    if expected is not error:
        traced = "".join(traceback.format_exception(error))
        _log(logging.ERROR, traced)
        if expected is None:
            first_line = (str(error).splitlines() or [""])[0]
            where = f"the traceback is in {path}" if path else "the traceback is above"
            expected = LockstepError(f"a bug ({type(error).__name__}: {first_line}); {where}")
            if path is None:
                _write(sys.stderr, traced.rstrip())
    # One line, whatever characters a value contains.
    text = "".join(c if c.isprintable() else repr(c)[1:-1] for c in str(expected))
    _write(sys.stderr, f"{_colored('error:', _RED, sys.stderr)} {text}")
    _log(logging.ERROR, str(expected))
    return expected.exit_code


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


def is_part() -> bool:
    """Returns whether the parent process is this program, too."""
    return PART_VARIABLE in os.environ


@contextlib.contextmanager
def resumable(run_dir: pathlib.Path, *, overwrite: bool) -> Iterator[None]:
    """Adds to an interruption of the block how to resume the run in a directory.

    Args:
        run_dir: the run directory.
        overwrite: whether another run may be there, which the new one removes when it starts.
    """
    run_dir, before = run_dir.absolute(), start_of_run(run_dir) if overwrite else ()
    try:
        yield
    except (KeyboardInterrupt, Terminated) as stop:
        is_saved = before != start_of_run(run_dir) and any(run_dir.glob("**/checkpoints/step-*"))
        if is_saved:
            stop.args = (f"; the state is saved; resume with: {_same_command(run_dir)}",)
        raise


def start_of_run(run_dir: pathlib.Path) -> tuple[int, int] | None:
    """Returns what changes when a run starts in a directory."""
    try:
        status = (run_dir / "config.json").stat()
    except OSError:
        return None
    return status.st_ino, status.st_mtime_ns


def report_interruption(stop: BaseException) -> int:
    """Prints the last line after a `KeyboardInterrupt` or `Terminated`; returns the exit code."""
    is_interrupt = isinstance(stop, KeyboardInterrupt)
    what = "interrupted" if is_interrupt else "terminated"
    _log(logging.ERROR, what)
    advice = stop.args[0] if stop.args else "; no state is saved yet; run the same command again"
    _write(sys.stderr, what if is_part() else f"{what}{advice}")
    return INTERRUPTED_EXIT_CODE if is_interrupt else TERMINATED_EXIT_CODE


def _same_command(run_dir: pathlib.Path) -> str:
    """Returns the command line that resumes a run, quoted for a shell."""
    words = [word for word in sys.argv if word.lstrip("-").partition("=")[0] != "overwrite"]
    if not any(word.lstrip("-").partition("=")[0] == "out" for word in words):
        words.append(f"--out={shown_path(str(run_dir))}")
    return shlex.join([shown_python(), *words])


def _logger() -> logging.Logger:
    """Returns the logger of this process, which prints nothing by itself."""
    logger = logging.getLogger("lockstep.program")
    logger.propagate = False
    logger.setLevel(logging.INFO)
    return logger


def _log(level: int, text: str) -> None:
    """Writes to the log, if there is one."""
    if _logger().handlers:
        _logger().log(level, "%s", text)


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
