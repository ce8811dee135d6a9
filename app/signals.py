"""Handles SIGINT and SIGTERM: the first lets a training finish its call and save; the second exits.

Python calls a handler between two instructions of the main thread. A signal therefore waits for the
current compiled call, which takes half a second or one step.
"""

import contextlib
import faulthandler
import signal
import sys
import threading
from collections.abc import Callable, Iterator

from app import console
from app.errors import LockstepError, Terminated

_ENDING = (signal.SIGINT, signal.SIGTERM)
# Signal with which the parent process asks this one to stop; never counts as a second signal. A
# terminal or a service manager may have sent the same signal to both processes.
STOP_REQUEST = signal.SIGUSR1
# SIGHUP of a closed terminal comes from the kernel, and often also from the shell.
_ALL = (*_ENDING, STOP_REQUEST, signal.SIGHUP)
_PERIOD_SEC = 0.5
_GRACE_SEC = 90.0  # A process that is suspended for a minute does not stall.


class _Handler:
    """Keeps the first signal, and exits at a second SIGINT or SIGTERM."""

    def __init__(self) -> None:
        self.first, self._count = 0, 0
        self.on_first: Callable[[], object] = lambda: None

    def __call__(self, number: int, _frame: object) -> None:
        self._count += number in _ENDING
        if self._count > 1:
            name = signal.Signals(number).name
            last_line = f"a second {name}: exiting now; the last checkpoint is kept"
            console.leave(128 + number, last_line)
        if not self.first:
            self.first = number
            self.on_first()


def install() -> None:
    """Handles SIGINT, SIGTERM, SIGHUP and stop requests from now on; call it in the main thread."""
    handler = _Handler()
    for number in _ALL:
        if signal.getsignal(number) != signal.SIG_IGN:  # Set by shells for background jobs.
            signal.signal(number, handler)


def reinstall() -> None:
    """Reinstalls the handlers; TensorFlow replaces that of SIGTERM when it joins a cluster."""
    for number in _ALL:
        if callable(handler := signal.getsignal(number)):
            signal.signal(number, handler)


@contextlib.contextmanager
def deferred(on_first: Callable[[], object] = lambda: None) -> Iterator[None]:
    """Lets a block finish its work after the first signal, at which `on_first` is called."""
    handler = _installed()
    before, handler.on_first = handler.on_first, on_first
    try:
        yield
    finally:
        handler.on_first = before


def requested() -> int:
    """Returns the number of the first signal received; 0 without one."""
    return _installed().first


def check(number: int | None = None) -> None:
    """Raises `KeyboardInterrupt` or `Terminated` for a signal, by default the one received here."""
    number = requested() if number is None else number
    if number:
        raise KeyboardInterrupt if number == signal.SIGINT else Terminated


def _installed() -> _Handler:
    """Returns the handler of this process, or one that gets no signal."""
    handlers = map(signal.getsignal, _ALL)
    return next((handler for handler in handlers if isinstance(handler, _Handler)), _Handler())


@contextlib.contextmanager
def stall_limit(timeout_sec: float, stalled: LockstepError) -> Iterator[Callable[[], None]]:
    """Ends the process if the block makes no progress; yields a function to call with progress.

    After `timeout_sec` (0: no limit), a thread writes the stacks of all threads to the log, or to
    standard error without one, and reports the error. Native code that holds Python's global lock
    stops the thread: then `faulthandler` writes the stacks, and SIGALRM ends the process.
    """
    idle_sec, ended, path = 0.0, threading.Event(), console.log_file()
    kernel_sec = timeout_sec + _GRACE_SEC

    def on_progress() -> None:
        nonlocal idle_sec
        idle_sec = 0.0
        if timeout_sec:
            signal.setitimer(signal.ITIMER_REAL, kernel_sec)
            faulthandler.dump_traceback_later(kernel_sec - 1, file=stacks)

    def count_idle_seconds() -> None:
        nonlocal idle_sec
        while not ended.wait(_PERIOD_SEC):
            idle_sec += _PERIOD_SEC  # Not the time for which the process was suspended.
            if timeout_sec and idle_sec >= timeout_sec:
                faulthandler.dump_traceback(stacks)
                console.leave(console.report_error(stalled))

    with open(path, "ab") if path else contextlib.nullcontext(sys.stderr) as stacks:
        on_progress()
        threading.Thread(target=count_idle_seconds, daemon=True).start()
        try:
            yield on_progress
        finally:
            ended.set()
            faulthandler.cancel_dump_traceback_later()
            signal.setitimer(signal.ITIMER_REAL, 0)
