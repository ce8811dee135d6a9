"""Holds the state of one command, and restores the process at its end.

Commands can run one after another in one process, each within its own `RunContext`.
"""

import contextlib
import contextvars
import logging
import os
import pathlib
import signal
import threading
from collections.abc import Callable
from typing import Any, Self

# Set for a process whose parent is this program, too; the parent prints the command that resumes.
PART_VARIABLE = "LOCKSTEP_PART"


class RunContext:
    """The state of one command; a context manager, within which `current` returns it.

    Leaving it restores what the command has changed in the process: environment
    variables and everything registered with `at_end`.

    Attributes:
        log: receives every printed line; has a file after `console.open_log`.
        log_file: path of that file; None before.
        run_dir: run directory whose log another process writes; None without one.
        will_overwrite: whether the run directory holds another run, which will be removed.
        is_part: whether another process prints the command that resumes the run.
        forward_warning: called with each warning instead of printing it; None to print it.
        requested_signal: first signal that asked the command to stop; None without one.
        on_first_signal: called at the first signal; None if it ends the process at once.
    """

    def __init__(self) -> None:
        self.log = logging.Logger("lockstep", logging.INFO)  # Not in `logging`'s registry.
        self.log.addHandler(logging.NullHandler())
        self.log_file: pathlib.Path | None = None
        self.run_dir: pathlib.Path | None = None
        self.will_overwrite = False
        self.is_part = PART_VARIABLE in os.environ
        self.forward_warning: Callable[[str], None] | None = None
        self.requested_signal: signal.Signals | None = None
        self.on_first_signal: Callable[[], object] | None = None
        self._kept: list[object] = []
        self._at_end = contextlib.ExitStack()

    def __enter__(self) -> Self:
        self._at_end.callback(_restore_environment, dict(os.environ))
        self._at_end.callback(_current.reset, _current.set(self))
        return self

    def __exit__(self, *exception: object) -> None:
        self._at_end.close()

    def at_end(self, call: Callable[..., object], *arguments: Any) -> None:
        """Registers a call for the end of the command; the last one registered runs first."""
        self._at_end.callback(call, *arguments)

    def keep(self, *kept: object) -> None:
        """Keeps objects alive until the end of the context, with their destructors."""
        self._kept += kept


_current: contextvars.ContextVar[RunContext | None] = contextvars.ContextVar(
    "run_context", default=None
)


def current() -> RunContext | None:
    """Returns the context of the running command; None outside of a command."""
    return _current.get()


def required() -> RunContext:
    """Returns the context of the running command.

    Raises:
        RuntimeError: there is none.
    """
    context = _current.get()
    if context is None:
        raise RuntimeError("this needs the state of a command; enter a RunContext")
    return context


def start_thread(
    target: Callable[..., object], *arguments: object, name: str | None = None
) -> threading.Thread:
    """Starts a daemon thread within the context of the command, which threads do not inherit."""
    run = contextvars.copy_context().run
    thread = threading.Thread(target=run, args=(target, *arguments), daemon=True, name=name)
    thread.start()
    return thread


def _restore_environment(saved: dict[str, str]) -> None:
    for name in os.environ.keys() - saved.keys():
        del os.environ[name]
    for name, value in saved.items():
        if os.environ.get(name) != value:
            os.environ[name] = value
