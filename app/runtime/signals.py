"""Handles SIGINT and SIGTERM: the first lets a training finish its call and save; the second exits.

Python calls a handler between two instructions of the main thread. A signal therefore waits for the
current compiled call, which takes half a second or one step, and for XLA while it compiles.
"""

import contextlib
import ctypes
import os
import signal
from collections.abc import Callable, Iterator

from app.runtime import console
from app.runtime.errors import INTERRUPTED_EXIT_CODE, TERMINATED_EXIT_CODE, Terminated

_EXIT_CODES = {signal.SIGINT: INTERRUPTED_EXIT_CODE, signal.SIGTERM: TERMINATED_EXIT_CODE}
# Signal with which the parent process asks this one to stop; never counts as a second signal. A
# terminal or a service manager may have sent the same signal to both processes.
STOP_REQUEST = signal.SIGUSR1
# SIGHUP of a closed terminal comes from the kernel, and often also from the shell.
_ALL = (*_EXIT_CODES, STOP_REQUEST, signal.SIGHUP)
_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None)  # Loaded here, because a forked child should not load libraries.


class _Handler:
    """Keeps the first signal, and exits at a second SIGINT or SIGTERM.

    Attributes:
        first: the first signal; None without one.
        on_first: called at the first signal.
    """

    def __init__(self) -> None:
        self.first: signal.Signals | None = None
        self.on_first: Callable[[], object] = lambda: None
        self._count = 0

    def __call__(self, number: int, _frame: object) -> None:
        received = signal.Signals(number)
        self._count += received in _EXIT_CODES
        if self._count > 1:
            last_line = f"a second {received.name}: exiting now; the last checkpoint is kept"
            console.leave(_EXIT_CODES[received], last_line)
        if self.first is None:
            self.first = received
            self.on_first()


def install() -> None:
    """Handles SIGINT, SIGTERM, SIGHUP and stop requests from now on; call it in the main thread."""
    handler = _Handler()
    for number in _ALL:
        if signal.getsignal(number) != signal.SIG_IGN:  # Set by shells for background jobs.
            signal.signal(number, handler)


def _installed() -> _Handler | None:
    handlers = map(signal.getsignal, _ALL)
    return next((handler for handler in handlers if isinstance(handler, _Handler)), None)


def reinstall() -> None:
    """Reinstalls handlers that a library has replaced without Python's signal module.

    TensorFlow replaces the SIGTERM handler when it joins a cluster; the signal would have no
    effect.
    """
    for number in _ALL:
        handler = signal.getsignal(number)
        if callable(handler):
            signal.signal(number, handler)


def end_with_parent(number: int, parent: int) -> None:
    """Makes the kernel send a signal to this process when its parent ends, even if killed.

    Linux only; does nothing on other systems.

    Args:
        number: signal number.
        parent: process id of the parent, which may have ended already.
    """
    with contextlib.suppress(OSError, AttributeError):
        _LIBC.prctl(_PR_SET_PDEATHSIG, number)
        if os.getppid() != parent:
            os.kill(os.getpid(), number)


@contextlib.contextmanager
def deferred(on_first: Callable[[], object] = lambda: None) -> Iterator[None]:
    """Lets a block finish its work after the first signal, until it calls `check`.

    Args:
        on_first: called at the first signal; `check` to raise the exception at once.
    """
    handler = _installed()
    if handler is None:
        yield
        return
    before, handler.on_first = handler.on_first, on_first
    try:
        yield
    finally:
        handler.on_first = before


def requested() -> int:
    """Returns the number of the first signal received; 0 without one."""
    handler = _installed()
    return (handler and handler.first) or 0


def check(number: int | None = None) -> None:
    """Raises the exception for a signal.

    Args:
        number: signal number, 0 for none; None for the signal received here.

    Raises:
        KeyboardInterrupt: the signal is SIGINT.
        Terminated: the signal is SIGTERM, or another stop request.
    """
    number = requested() if number is None else number
    if number:
        raise KeyboardInterrupt if number == signal.SIGINT else Terminated
