"""The state of one command, handed to the functions that it calls and undone when it ends.

Two commands can run one after another in one process: each runs within a `RunContext` of its own.
"""

import contextlib
import contextvars
import logging
import os
import pathlib
import signal
import tempfile
import threading
from collections.abc import Callable
from typing import Any, Self

from app.runtime.temporary_directories import TemporaryDirectory

# Set for a process whose parent is this program, too, and says which command resumes the run.
PART_VARIABLE = "LOCKSTEP_PART"


class RunContext:
    """The state of one command; a context manager, within which `current` returns it.

    Leaving it undoes what the command has changed in the process: environment variables, the
    directory for temporary files, and all that was handed to `at_end`.

    Attributes:
        log: takes every line that is printed; it has a file once `console.open_log` was called.
        log_file: the path of that file, None before.
        run_dir: a run directory whose log another process writes, None without one.
        will_overwrite: whether the run directory holds another run, which will be thrown away.
        is_part: whether another process says which command resumes the run.
        forward_warning: called with each warning in place of printing it, None to print it.
        requested_signal: the first signal that asked the command to stop, None without one.
        defers_signals: whether a signal raises nothing until `signals.check` is called.
        pass_fault_point: called at each fault point with its name, None where no fault is armed.
    """

    def __init__(self) -> None:
        self.log = logging.Logger("lockstep", logging.INFO)  # Not one of `logging`'s own registry.
        self.log.addHandler(logging.NullHandler())
        self.log_file: pathlib.Path | None = None
        self.run_dir: pathlib.Path | None = None
        self.will_overwrite = False
        self.is_part = PART_VARIABLE in os.environ
        self.forward_warning: Callable[[str], None] | None = None
        self.requested_signal: signal.Signals | None = None
        self.defers_signals = False
        self.pass_fault_point: Callable[[str], None] | None = None
        self._temporary: TemporaryDirectory | None = None
        self._kept: list[object] = []
        self._at_end = contextlib.ExitStack()

    def __enter__(self) -> Self:
        self._at_end.callback(_restore_environment, dict(os.environ))
        self._at_end.callback(_current.reset, _current.set(self))
        return self

    def __exit__(self, *exception: object) -> None:
        self._at_end.close()

    def at_end(self, call: Callable[..., object], *arguments: Any) -> None:
        """Has something done when the command ends: what was added last is done first."""
        self._at_end.callback(call, *arguments)

    def keep(self, *kept: object) -> None:
        """Keeps objects for as long as the context is there, whose destructors must not run."""
        self._kept += kept

    def use_temporary_directory(self) -> None:
        """Directs temporary files into a directory that goes with the command.

        A process that is killed leaves the directory; the next one that starts removes it.

        Raises:
            DiskFullError: there is no place for it.
        """
        if self._temporary:
            return
        self.at_end(setattr, tempfile, "tempdir", tempfile.tempdir)
        self._temporary = TemporaryDirectory()
        self.at_end(self._temporary.cleanup)
        # The variable is for TensorFlow's native code; a process that we start is given its own.
        tempfile.tempdir = os.environ["TMPDIR"] = self._temporary.name

    def remove_temporary_directory(self) -> None:
        """Removes the directory of temporary files, as the process is about to leave at once."""
        if self._temporary:
            self._temporary.cleanup()


_current: contextvars.ContextVar[RunContext | None] = contextvars.ContextVar(
    "run_context", default=None
)


def current() -> RunContext | None:
    """Returns the context of the command that runs, None outside of one."""
    return _current.get()


def required() -> RunContext:
    """Returns the context of the command that runs.

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
