"""SIGINT and SIGTERM: the first one lets a training finish its call and save, the second does not.

Python's own handlers run between two lines of Python, so a compiled call of a minute would hold
them back. A thread reads each signal as it comes in, and ends the process at the second one.
"""

import contextlib
import ctypes
import functools
import os
import signal
import socket
import types
from collections.abc import Iterator

from app.runtime import console, run_context
from app.runtime.errors import INTERRUPTED_EXIT_CODE, TERMINATED_EXIT_CODE, Terminated

_EXIT_CODES = {signal.SIGINT: INTERRUPTED_EXIT_CODE, signal.SIGTERM: TERMINATED_EXIT_CODE}
# How the process that started us asks us to stop: once or more, and never as a second signal.
# A terminal, or a service manager, may have sent us the same signal as it.
STOP_REQUEST = signal.SIGUSR1
# Of a terminal that is closed: from the kernel, and often from the shell, too.
HANG_UP = signal.SIGHUP
_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None)  # Loaded here: a child that has just been forked should load nothing.


@contextlib.contextmanager
def handled() -> Iterator[None]:
    """Takes SIGINT, SIGTERM and requests to stop over while a command runs, in the main thread.

    Afterwards the process has the handlers that it had before, and no thread of ours.
    """
    context = run_context.required()
    handler = functools.partial(_handle, context)
    with contextlib.ExitStack() as stack:
        ours, theirs = (stack.enter_context(end) for end in socket.socketpair())
        thread = run_context.start_thread(_watch, ours, name="signals")
        stack.callback(thread.join)
        stack.callback(theirs.close)  # The thread ends.
        theirs.setblocking(False)
        before = signal.set_wakeup_fd(theirs.fileno(), warn_on_full_buffer=False)
        stack.callback(signal.set_wakeup_fd, before, warn_on_full_buffer=False)
        for number in (*_EXIT_CODES, STOP_REQUEST, HANG_UP):
            previous = signal.getsignal(number)
            if previous == signal.SIG_IGN:  # As a shell starts background jobs.
                continue
            signal.signal(number, handler)
            if previous is not None:  # It is Python's own.
                stack.callback(signal.signal, number, previous)
        yield


def reinstall() -> None:
    """Takes over again what a library has taken from us behind Python's back.

    TensorFlow does so with SIGTERM when it joins a cluster: nothing would come of it any more.
    """
    for number in (*_EXIT_CODES, STOP_REQUEST, HANG_UP):
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
    context = run_context.current()
    if context is None:
        yield
        return
    context.defers_signals = True
    try:
        yield
    finally:
        context.defers_signals = False


def requested() -> int:
    """Returns the number of the first signal that came in, 0 where none has."""
    context = run_context.current()
    return (context and context.requested_signal) or 0


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


def _handle(context: run_context.RunContext, number: int, frame: types.FrameType | None) -> None:
    if context.requested_signal is not None:  # It is told of already, or will be.
        return
    context.requested_signal = signal.Signals(number)
    if not context.defers_signals:
        check(number)


def _watch(ours: socket.socket) -> None:
    """Runs in a thread of its own: leaves at the second signal, whatever the others do."""
    count = 0
    while numbers := ours.recv(16):
        for number in numbers:
            count += number in _EXIT_CODES
            if count > 1:
                _leave(signal.Signals(number))


def _leave(number: signal.Signals) -> None:
    with contextlib.suppress(OSError):
        os.write(2, f"a second {number.name}: left at once, what was saved stands\n".encode())
    console.leave(_EXIT_CODES[number])
