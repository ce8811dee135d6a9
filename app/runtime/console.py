"""What a person sees: lines, tables, warnings and the last line; all of it in log.txt, too.

Results go to standard output, warnings and errors to standard error.
"""

import contextlib
import logging
import os
import pathlib
import shlex
import sys
import traceback
from collections.abc import Callable
from typing import NoReturn, TextIO

from app.runtime.errors import LockstepError

_log = logging.getLogger("lockstep")
_log.propagate = False
_log.addHandler(logging.NullHandler())
_log.setLevel(logging.INFO)


def open_log(path: pathlib.Path) -> None:
    """Writes everything that is said from now on to `path` as well, with the time of day."""
    logging.raiseExceptions = False  # A disk too full for a log line is told by what needs it.
    os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o644))
    handler = logging.FileHandler(path, encoding="utf-8")
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    _log.addHandler(handler)


def log(text: str) -> None:
    """Writes a line into the log alone."""
    _log.info(text)


def say(text: str = "") -> None:
    """Prints a line on standard output."""
    _log.info(text)
    _write(sys.stdout, text)


_will_overwrite = False


def set_overwriting(will_overwrite: bool) -> None:
    """Notes whether what is in the run's directory is that of another run, to be thrown away."""
    global _will_overwrite
    _will_overwrite = will_overwrite


_forward_warning: Callable[[str], None] | None = None


def forward_warnings(forward: Callable[[str], None]) -> None:
    """Hands warnings on, for another process to print them."""
    global _forward_warning
    _forward_warning = forward


def warn(text: str) -> None:
    """Prints a warning that cannot be missed."""
    if _forward_warning:
        _forward_warning(text)
        return
    _log.warning(text)
    bold, plain = ("\033[1;33m", "\033[0m") if sys.stderr.isatty() else ("", "")
    _write(sys.stderr, f"{bold}WARNING: {text}{plain}")


def count(number: int, noun: str) -> str:
    """Returns "1 step", "2 steps"."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def report_error(error: LockstepError) -> int:
    """Prints the one line that ends a command and returns its exit code."""
    # One line, whatever characters a value had.
    _write(
        sys.stderr, "error: " + "".join(c if c.isprintable() else repr(c)[1:-1] for c in str(error))
    )
    _log.error("%s", error)
    return error.exit_code


_before_leaving: list[Callable[[], None]] = []


def before_leaving(call: Callable[[], None]) -> None:
    """Has something done before the process leaves at once; it must not raise."""
    _before_leaving.append(call)


def leave(exit_code: int) -> NoReturn:
    """Ends the process at once, in any thread; a terminal has its cursor back."""
    for call in _before_leaving:
        call()
    for stream in (sys.stdout, sys.stderr):
        if stream.isatty():
            with contextlib.suppress(OSError):
                os.write(stream.fileno(), b"\033[?25h")
    os._exit(exit_code)


# Set for a process whose parent, ours too, says how to go on.
PART_VARIABLE = "LOCKSTEP_PART"

_is_part = PART_VARIABLE in os.environ


def be_part() -> None:
    """Leaves it to another process to say how to go on: this one is part of what it does."""
    global _is_part
    _is_part = True


_run_dir: pathlib.Path | None = None


def set_run_directory(path: pathlib.Path) -> None:
    """Notes where a run is whose log another process writes."""
    global _run_dir
    _run_dir = path.absolute()


def pass_on(stream: TextIO, line: str) -> None:
    """Prints a line of another process as it is; that one's own log has it."""
    _write(stream, line)


def report_interruption(what: str, exit_code: int) -> int:
    """Says with which command to go on, where something is saved; returns the exit code."""
    if _is_part:
        _write(sys.stderr, what)
        _log.error("%s", what)
        return exit_code
    log_file = _log_file()
    run_dir = pathlib.Path(log_file).parent if log_file else _run_dir
    with contextlib.suppress(OSError, ValueError):  # The current directory may be gone.
        run_dir = run_dir and pathlib.Path(os.path.relpath(run_dir))
    if run_dir and any(run_dir.glob("**/checkpoints/step-*")) and not _will_overwrite:
        _write(sys.stderr, f"{what} — the state is saved; go on with: {_same_command(run_dir)}")
    else:
        _write(sys.stderr, f"{what} — nothing is saved yet; run the same command again")
    _log.error("%s", what)
    return exit_code


def _same_command(run_dir: pathlib.Path) -> str:
    """Returns the command line that goes on with a run, as a shell takes it."""
    words = [word for word in sys.argv if word.lstrip("-").partition("=")[0] != "overwrite"]
    if not any(word.lstrip("-").partition("=")[0] == "out" for word in words):
        words.append(f"--out={run_dir}")
    return shlex.join(["python", *words])


def report_bug(error: Exception) -> int:
    """Puts the traceback into the log, or on standard error where there is none; returns 1."""
    text = "".join(traceback.format_exception(error))
    log_file = _log_file()
    if log_file:
        _log.error("%s", text)
    else:
        _write(sys.stderr, text.rstrip())
    first_line = (str(error).splitlines() or [""])[0]
    where = f"the traceback is in {log_file}" if log_file else "the traceback is above"
    _write(sys.stderr, f"error: a bug ({type(error).__name__}: {first_line}) — {where}")
    return 1


def _log_file() -> str | None:
    """Returns the path of the log, None where no run has opened one."""
    files = [h.baseFilename for h in _log.handlers if isinstance(h, logging.FileHandler)]
    return files[-1] if files else None


def _write(stream: TextIO, text: str) -> None:
    """Prints and flushes; a reader that went away (`| head -1`) must not stop a training."""
    try:
        print(text, file=stream, flush=True)
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def print_table(title: str, header: list[str], rows: list[list[str]]) -> None:
    """Prints a table, first column to the left and numbers to the right."""
    import rich.box
    import rich.console
    import rich.table

    table = rich.table.Table(box=rich.box.SIMPLE_HEAD)
    for position, name in enumerate(header):
        table.add_column(name, justify="left" if position == 0 else "right")
    for row in rows:
        table.add_row(*row)
    # A pipe has no width of its own: wide enough that no table is folded.
    console = rich.console.Console(width=None if sys.stdout.isatty() else 120, color_system=None)
    say(title)
    with console.capture() as capture:
        console.print(table)
    for line in capture.get().rstrip("\n").split("\n"):
        if line.strip():
            say(line.rstrip())
