"""Handles SIGINT and SIGTERM: the first lets a training finish its call and save; the second exits.

Python's signal handlers run between bytecodes, so that a compiled call of a minute would delay
them. A separate thread reads each signal when it arrives, and acts on it: within `deferred`, it
sets a flag, which `check` turns into an exception; elsewhere nothing is to be saved, and it exits.
"""

import contextlib
import ctypes
import signal
import socket
from collections.abc import Callable, Iterator

from app.runtime import console, run_context
from app.runtime.errors import INTERRUPTED_EXIT_CODE, TERMINATED_EXIT_CODE, Terminated

_EXIT_CODES = {signal.SIGINT: INTERRUPTED_EXIT_CODE, signal.SIGTERM: TERMINATED_EXIT_CODE}
# Signal with which the parent process asks this one to stop; never counts as a second signal. A
# terminal or a service manager may have sent the same signal to both processes.
STOP_REQUEST = signal.SIGUSR1
# SIGHUP of a closed terminal comes from the kernel, and often also from the shell.
HANG_UP = signal.SIGHUP
_ALL = (*_EXIT_CODES, STOP_REQUEST, HANG_UP)
_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None)  # Loaded here, because a forked child should not load libraries.


@contextlib.contextmanager
def handled() -> Iterator[None]:
    """Handles SIGINT, SIGTERM and stop requests while a command runs, in the main thread.

    Afterwards the process has its earlier handlers, and no additional thread.
    """
    with contextlib.ExitStack() as stack:
        ours, theirs = (stack.enter_context(end) for end in socket.socketpair())
        thread = run_context.start_thread(_watch, ours, run_context.required(), name="signals")
        stack.callback(thread.join)
        stack.callback(theirs.close)  # Ends the thread.
        theirs.setblocking(False)
        before = signal.set_wakeup_fd(theirs.fileno(), warn_on_full_buffer=False)
        stack.callback(signal.set_wakeup_fd, before, warn_on_full_buffer=False)
        for number in _ALL:
            previous = signal.getsignal(number)
            if previous != signal.SIG_IGN:  # Set by shells for background jobs.
                signal.signal(number, _wake_up)
                stack.callback(signal.signal, number, previous or signal.SIG_DFL)
        yield


def reinstall() -> None:
    """Reinstalls handlers that a library has replaced without Python's signal module.

    TensorFlow replaces the SIGTERM handler when it joins a cluster; the signal would have no
    effect.
    """
    for number in _ALL:
        handler = signal.getsignal(number)
        if callable(handler):
            signal.signal(number, handler)


def end_with_parent(number: int = STOP_REQUEST) -> None:
    """Makes the kernel send a signal to this process when its parent ends, even if killed.

    Call it in the child before its program runs. Linux only; does nothing on other systems.
    """
    with contextlib.suppress(OSError, AttributeError):
        _LIBC.prctl(_PR_SET_PDEATHSIG, number)


@contextlib.contextmanager
def deferred(on_first: Callable[[], object] = lambda: None) -> Iterator[None]:
    """Lets a block finish its work after the first signal, until it calls `check`.

    Args:
        on_first: called in a separate thread at the first signal.
    """
    context = run_context.current()
    if context is None:
        yield
        return
    context.on_first_signal = on_first
    try:
        yield
    finally:
        context.on_first_signal = None


def requested() -> int:
    """Returns the number of the first signal received; 0 without one."""
    context = run_context.current()
    return (context and context.requested_signal) or 0


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


def _wake_up(*_: object) -> None:
    """Does nothing: Python writes the signal to the thread's socket."""


def _watch(ours: socket.socket, context: run_context.RunContext) -> None:
    """Runs in a separate thread: acts on each signal, whatever other threads do."""
    count = 0
    while numbers := ours.recv(16):
        for number in numbers:
            if number not in _ALL:
                continue
            count += number in _EXIT_CODES
            if count > 1:
                last_line = f"a second {signal.Signals(number).name}: exiting now; the last"
                console.leave(
                    _EXIT_CODES[signal.Signals(number)], f"{last_line} checkpoint is kept"
                )
            if context.requested_signal is None:
                context.requested_signal = signal.Signals(number)
                if context.on_first_signal is None:
                    console.leave(console.report_interruption(number == signal.SIGINT))
                context.on_first_signal()
