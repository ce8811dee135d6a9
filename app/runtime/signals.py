"""Handles SIGINT and SIGTERM: the first lets a training finish its call and save; the second exits.

Python's signal handlers run between bytecodes, so that a compiled call of a minute would delay
them. A separate thread reads each signal when it arrives, and exits at the second one.
"""

import contextlib
import ctypes
import functools
import signal
import socket
import sys
import types
from collections.abc import Callable, Iterator

from app.runtime import console, run_context
from app.runtime.errors import INTERRUPTED_EXIT_CODE, TERMINATED_EXIT_CODE, Terminated

_EXIT_CODES = {signal.SIGINT: INTERRUPTED_EXIT_CODE, signal.SIGTERM: TERMINATED_EXIT_CODE}
# Signal with which the parent process asks this one to stop; never counts as a second signal. A
# terminal or a service manager may have sent the same signal to both processes.
STOP_REQUEST = signal.SIGUSR1
# SIGHUP of a closed terminal comes from the kernel, and often also from the shell.
HANG_UP = signal.SIGHUP
_PR_SET_PDEATHSIG = 1
_REPEAT_SEC = 0.01
_LIBC = ctypes.CDLL(None)  # Loaded here, because a forked child should not load libraries.


@contextlib.contextmanager
def handled() -> Iterator[None]:
    """Handles SIGINT, SIGTERM and stop requests while a command runs, in the main thread.

    Afterwards the process has its earlier handlers, and no additional thread.
    """
    context = run_context.required()
    handler = functools.partial(_handle, context)
    with contextlib.ExitStack() as stack:
        ours, theirs = (stack.enter_context(end) for end in socket.socketpair())
        thread = run_context.start_thread(_watch, ours, name="signals")
        stack.callback(thread.join)
        stack.callback(theirs.close)  # Ends the thread.
        theirs.setblocking(False)
        before = signal.set_wakeup_fd(theirs.fileno(), warn_on_full_buffer=False)
        stack.callback(signal.set_wakeup_fd, before, warn_on_full_buffer=False)
        for number in (*_EXIT_CODES, STOP_REQUEST, HANG_UP):
            previous = signal.getsignal(number)
            if previous == signal.SIG_IGN:  # Set by shells for background jobs.
                continue
            signal.signal(number, handler)
            if previous is not None:  # Set by Python.
                stack.callback(signal.signal, number, previous)
        _repeat_dropped(context, stack)
        yield


def reinstall() -> None:
    """Reinstalls handlers that a library has replaced without Python's signal module.

    TensorFlow replaces the SIGTERM handler when it joins a cluster; the signal would have no
    effect.
    """
    for number in (*_EXIT_CODES, STOP_REQUEST, HANG_UP):
        handler = signal.getsignal(number)
        if callable(handler):
            signal.signal(number, handler)


def end_with_parent(number: int = STOP_REQUEST) -> None:
    """Makes the kernel send a signal to this process when its parent ends, even if killed.

    The signal may arrive more than once, for each thread of the parent. SIGKILL ends even a
    suspended process; `STOP_REQUEST` lets it save.

    Call it in the child before its program runs. Linux only; does nothing on other systems.
    """
    with contextlib.suppress(OSError, AttributeError):
        _LIBC.prctl(_PR_SET_PDEATHSIG, number)


@contextlib.contextmanager
def deferred() -> Iterator[None]:
    """Defers signals: they raise only when `check` is called."""
    context = run_context.current()
    if context is None:
        yield
        return
    context.defers_signals = True
    try:
        yield
    finally:
        context.defers_signals = False


@contextlib.contextmanager
def raised() -> Iterator[None]:
    """Raises signals within the block, around which they are deferred."""
    context = run_context.required()
    context.defers_signals = False
    try:
        check()
        yield
    finally:
        context.defers_signals = True


@contextlib.contextmanager
def unmasked() -> Iterator[None]:
    """Raises the interruption itself if it has become another error on its way.

    A signal can interrupt Python anywhere, also while TensorFlow enters or leaves a graph, whose
    clean-up then fails and replaces the exception ("Nesting violated for default stack"), or while
    native code calls Python, and raises another one. No code continues after an interruption, so
    that every later error is its consequence.
    """
    try:
        yield
    except Exception:
        context = run_context.current()
        if context is None or context.interruption is None:
            raise
        raise context.interruption from None


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
        raise _interruption(number)


def _interruption(number: int) -> KeyboardInterrupt | Terminated:
    return KeyboardInterrupt() if number == signal.SIGINT else Terminated()


def _handle(context: run_context.RunContext, number: int, frame: types.FrameType | None) -> None:
    if context.requested_signal is not None:  # Reported already, or about to be.
        return
    context.requested_signal = signal.Signals(number)
    if not context.defers_signals:
        context.interruption = _interruption(number)
        raise context.interruption


def _repeat_dropped(context: run_context.RunContext, stack: contextlib.ExitStack) -> None:
    """Raises an interruption again that Python has dropped, because a destructor was running.

    Python reports such an exception to `sys.unraisablehook`, and continues.
    """
    report: Callable[[sys.UnraisableHookArgs], object] = sys.unraisablehook

    def repeat(dropped: "sys.UnraisableHookArgs") -> None:
        if dropped.exc_value is None or dropped.exc_value is not context.interruption:
            report(dropped)
        else:
            signal.setitimer(signal.ITIMER_REAL, _REPEAT_SEC)

    def raise_again(number: int, frame: types.FrameType | None) -> None:
        if context.interruption and not context.defers_signals:
            raise context.interruption

    previous = signal.signal(signal.SIGALRM, raise_again) or signal.SIG_DFL
    stack.callback(signal.signal, signal.SIGALRM, previous)
    stack.callback(signal.setitimer, signal.ITIMER_REAL, 0)
    stack.callback(setattr, sys, "unraisablehook", report)
    sys.unraisablehook = repeat


def _watch(ours: socket.socket) -> None:
    """Runs in a separate thread: exits at the second signal, whatever other threads do."""
    count = 0
    while numbers := ours.recv(16):
        for number in numbers:
            count += number in _EXIT_CODES
            if count > 1:
                _leave(signal.Signals(number))


def _leave(number: signal.Signals) -> None:
    last_line = f"a second {number.name}: left at once, what was saved stands"
    console.leave(_EXIT_CODES[number], last_line)
