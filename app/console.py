"""Prints lines, tables and warnings, and writes all of them to log.txt.

Results are printed to standard output, warnings and errors to standard error.
"""

import contextlib
import logging
import os
import pathlib
import re
import shlex
import shutil
import signal
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NoReturn, TextIO

from app.errors import LockstepError, Terminated, expected_error, reason_of

# Set for a process whose parent is this program, too; the parent prints the command that resumes.
PART_VARIABLE = "LOCKSTEP_PART"
_MAIN = pathlib.Path(__file__).parents[1] / "main.py"
_LOGGER = logging.getLogger("lockstep.program")
_LOGGER.propagate = False
_LOGGER.setLevel(logging.INFO)


class _LogFile(logging.FileHandler):
    """A log file that ignores a full disk, which the failed write of a record reports."""

    def _open(self) -> Any:
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
        flags |= os.O_NOFOLLOW | os.O_NONBLOCK  # Neither a link nor a pipe.
        return open(os.open(self.baseFilename, flags, 0o644), "a", encoding="utf-8")

    def handleError(self, record: logging.LogRecord) -> None:
        pass


def open_log(path: pathlib.Path) -> None:
    """Writes all further output of this process to a file, too; raises `OSError` if it cannot."""
    handler = _LogFile(path, encoding="utf-8")
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    _LOGGER.addHandler(handler)


def log_file() -> pathlib.Path | None:
    """Returns the path of the log; None without one."""
    logs = (each for each in _LOGGER.handlers if isinstance(each, _LogFile))
    return next((pathlib.Path(each.baseFilename) for each in logs), None)


def log(text: str, level: int = logging.INFO) -> None:
    """Writes a line only to the log, if there is one."""
    if _LOGGER.handlers:
        _LOGGER.log(level, "%s", text)


def say(text: str = "") -> None:
    """Prints a line on standard output."""
    log(text)
    _write(sys.stdout, text)


def forward_warnings(forward: Callable[[str], None]) -> None:
    """Forwards warnings to a function instead of printing them."""
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: forward(record.getMessage())  # type: ignore[method-assign]
    _LOGGER.addHandler(handler)


def warn(text: str) -> None:
    """Prints a warning, unless warnings are forwarded."""
    log(text, logging.WARNING)
    if all(isinstance(handler, _LogFile) for handler in _LOGGER.handlers):
        _write(sys.stderr, f"WARNING: {text}")


def count(number: int, noun: str) -> str:
    """Returns "1 step", "2 steps"."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def report_error(error: BaseException) -> int:
    """Prints the last line of a failed command, or a traceback without a log; returns the code."""
    expected, path = expected_error(error), log_file()
    if expected is not error:
        traced = "".join(traceback.format_exception(error)).rstrip()
        log(traced, logging.ERROR)
        if expected is None:
            if path is None:
                _write(sys.stderr, traced)
            bug = f"a bug ({type(error).__name__}: {reason_of(error)})"
            expected = LockstepError(f"{bug}; the traceback is {f'in {path}' if path else 'above'}")
    log(str(expected), logging.ERROR)
    # One line, whatever characters a value contains.
    line = "".join(c if c.isprintable() else repr(c)[1:-1] for c in str(expected))
    _write(sys.stderr, f"error: {line}")
    return expected.exit_code


def report_interruption(stop: BaseException) -> int:
    """Prints the last line after a `KeyboardInterrupt` or `Terminated`; returns the exit code."""
    what, number = "terminated", signal.SIGTERM
    if isinstance(stop, KeyboardInterrupt):
        what, number = "interrupted", signal.SIGINT
    log(what, logging.ERROR)
    advice = stop.args[0] if stop.args else "no state is saved yet; run the same command again"
    _write(sys.stderr, what if PART_VARIABLE in os.environ else f"{what}; {advice}")
    return 128 + number


def leave(exit_code: int, last_line: str = "") -> NoReturn:
    """Exits the process immediately, from any thread, and restores the terminal's cursor."""
    with contextlib.suppress(OSError):
        if sys.stdout.isatty():
            os.write(1, b"\033[?25h")
        os.write(2, f"{last_line}\n".encode() if last_line else b"")
    os._exit(exit_code)


@contextlib.contextmanager
def resumable(run_dir: pathlib.Path, *, overwrite: bool) -> Iterator[None]:
    """Adds to an interruption of the block how to resume its run, not one that it overwrites."""
    run_dir, before = run_dir.absolute(), start_of_run(run_dir) if overwrite else ()
    try:
        yield
    except (KeyboardInterrupt, Terminated) as stop:
        if before != start_of_run(run_dir) and any(run_dir.glob("**/checkpoints/step-*")):
            words = [word for word in sys.argv if not re.match("--?overwrite", word)]
            if not any(re.match("--?out(=|$)", word) for word in words):
                words.append(f"--out={_shown_path(run_dir)}")
            command = shlex.join([shown_python(), *words])
            stop.args = (f"the state is saved; resume with: {command}",)
        raise


def start_of_run(run_dir: pathlib.Path) -> tuple[int, int] | None:
    """Returns what changes when a run starts in a directory."""
    with contextlib.suppress(OSError):
        status = (run_dir / "config.json").stat()
        return status.st_ino, status.st_mtime_ns
    return None


def shown_command(words: Iterable[str]) -> str:
    """Returns the command line of this program with a command and flags, as a shell takes it."""
    return shlex.join([shown_python(), _shown_path(_MAIN), *words])


def shown_python() -> str:
    """Returns how to call this Python: `python` if that is this one, else its path."""
    # Not by what links lead to: that is the same Python for every virtual environment.
    is_python = shutil.which("python") == sys.executable
    return "python" if is_python else _shown_path(pathlib.Path(sys.executable))


def _shown_path(path: pathlib.Path) -> str:
    """Returns a path relative to the current directory if it is below it, else the full path."""
    with contextlib.suppress(OSError, ValueError):  # The current directory may be gone.
        return str(path.relative_to(pathlib.Path.cwd()))
    return str(path)


def is_numeric(cells: Sequence[str]) -> bool:
    """Returns whether all cells of a column are dashes or begin with a number: align right."""
    return all(re.match(r"–?$|[-+±<≤✗≠ ]*[0-9]", cell) for cell in cells)


def print_table(title: str, header: list[str], rows: list[list[str]]) -> None:
    """Prints a table; names are aligned left, numbers right."""
    from rich import box, table
    from rich.console import Console

    shown = table.Table(box=box.SIMPLE_HEAD)
    for position, (name, *cells) in enumerate(zip(header, *rows, strict=True)):
        is_number = position > 0 and is_numeric(cells)
        shown.add_column(name, justify="right" if is_number else "left", overflow="fold")
    for row in rows:
        shown.add_row(*row)
    # A pipe has no width: nothing is wrapped, so that programs can read the rows.
    console = Console(width=None if sys.stdout.isatty() else 1000, color_system=None)
    say(title)
    with console.capture() as capture:
        console.print(shown)
    for line in filter(str.strip, capture.get().split("\n")):
        say(line.rstrip())


def _write(stream: TextIO, text: str) -> None:
    """Prints and flushes; a closed pipe (`| head -1`) must not stop a training."""
    try:
        print(text, file=stream, flush=True)
    except OSError:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)
