"""SIGINT and SIGTERM: the first one lets a training finish its call and save, the second does not.

Python's own handlers run between two lines of Python, so a compiled call of a minute would hold
them back. A thread reads each signal as it comes in, and ends the process at the second one.
"""

import contextlib
import ctypes
import os
import signal
import socket
import threading
import types
from collections.abc import Iterator

from app.runtime import console
from app.runtime.errors import INTERRUPTED_EXIT_CODE, TERMINATED_EXIT_CODE, Terminated

_EXIT_CODES = {signal.SIGINT: INTERRUPTED_EXIT_CODE, signal.SIGTERM: TERMINATED_EXIT_CODE}
# How the process that started us asks us to stop: once or more, and never as a second signal.
# A terminal, or a service manager, may have sent us the same signal as it.
STOP_REQUEST = signal.SIGUSR1
# Of a terminal that is closed: from the kernel, and often from the shell, too.
_HANG_UP = signal.SIGHUP
_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None)  # Loaded here: a child that has just been forked should load nothing.

_requested: signal.Signals | None = None
_deferred = False


def install() -> None:
    """Takes SIGINT and SIGTERM over, for good; called once, by the main thread."""
    for number in (*_EXIT_CODES, STOP_REQUEST, _HANG_UP):
        if signal.getsignal(number) != signal.SIG_IGN:  # As a shell starts background jobs.
            signal.signal(number, _handle)
    ours, theirs = socket.socketpair()
    theirs.setblocking(False)
    signal.set_wakeup_fd(theirs.fileno(), warn_on_full_buffer=False)
    threading.Thread(target=_watch, args=(ours, theirs), daemon=True, name="signals").start()


def reinstall() -> None:
    """Takes over again what a library has taken from us behind Python's back.

    TensorFlow does so with SIGTERM when it joins a cluster: nothing would come of it any more.
    """
    for number in (*_EXIT_CODES, STOP_REQUEST, _HANG_UP):
        handler = signal.getsignal(number)
        if callable(handler):
            signal.signal(number, handler)


def end_with_parent(number: int = STOP_REQUEST) -> None:
    """Has the kernel send a signal when the process that started this one ends, killed even.

    It may come more than once: for each thread of the other one. SIGKILL ends this one for
    certain, stopped even; `STOP_REQUEST` lets it save.

    To be called in the child, before its program runs. Linux only; elsewhere nothing is done.
    """
    with contextlib.suppress(OSError, AttributeError):
        _LIBC.prctl(_PR_SET_PDEATHSIG, number)


@contextlib.contextmanager
def deferred() -> Iterator[None]:
    """Within it a signal raises nothing until `check` is called."""
    global _deferred
    _deferred = True
    try:
        yield
    finally:
        _deferred = False


def requested() -> int:
    """Returns the number of the first signal that came in, 0 where none has."""
    return _requested or 0


def check(number: int | None = None) -> None:
    """Raises what a signal asks for.

    Args:
        number: of the signal, 0 for none; None for what came in here.

    Raises:
        KeyboardInterrupt: it is SIGINT.
        Terminated: it is SIGTERM, or another that asks to stop.
    """
    number = requested() if number is None else number
    if number:
        raise KeyboardInterrupt if number == signal.SIGINT else Terminated


def _handle(number: int, frame: types.FrameType | None) -> None:
    global _requested
    if _requested is not None:  # It is told of already, or will be.
        return
    _requested = signal.Signals(number)
    if not _deferred:
        check()


def _watch(ours: socket.socket, theirs: socket.socket) -> None:
    """Runs in a thread of its own: leaves at the second signal, whatever the others do."""
    count = 0
    while True:
        for number in ours.recv(16):
            count += number in _EXIT_CODES
            if count > 1:
                _leave(signal.Signals(number))


def _leave(number: signal.Signals) -> None:
    with contextlib.suppress(OSError):
        os.write(2, f"a second {number.name}: left at once, what was saved stands\n".encode())
    console.leave(_EXIT_CODES[number])
