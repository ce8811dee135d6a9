"""Ends a training without progress, which hangs in a collective, on a disk or on a device."""

import contextlib
import ctypes
import faulthandler
import pathlib
import signal
import threading
import time
from collections.abc import Callable, Iterator

from app.runtime import console, run_context
from app.runtime.errors import StalledError

_PERIOD_SEC = 0.5
_REPORT_SEC = 5.0
_STANDARD_ERROR = 2
# The kernel ends a process so long after it has written the stacks.
_MAX_GRACE_SEC = 30.0


@contextlib.contextmanager
def watch(timeout_sec: float, on_stall: Callable[[], None]) -> Iterator[Callable[[], None]]:
    """Ends the process with code 138 if the block of a `with` statement makes no progress.

    Only seconds in which this process could run count, so that a suspended process or machine does
    not count as stalled. A process whose native code holds Python's lock for that long, so that no
    thread can run, is ended by a timer of the kernel (`_KernelTimer`).

    Args:
        timeout_sec: seconds without progress that count as a stall; 0 for no limit.
        on_stall: called in a separate thread before the process ends.

    Yields:
        A function to call whenever there is progress.
    """
    if not timeout_sec:
        yield lambda: None
        return
    idle_sec, ended = 0.0, threading.Event()

    def on_progress() -> None:
        nonlocal idle_sec
        idle_sec = 0.0

    def count_idle_seconds() -> None:
        nonlocal idle_sec
        last, context = time.monotonic(), run_context.current()
        with contextlib.closing(kernel_timer):
            while not ended.wait(_PERIOD_SEC):
                kernel_timer.restart(context.log_file if context else None)
                now = time.monotonic()
                idle_sec += min(now - last, 2 * _PERIOD_SEC)
                last = now
                if idle_sec >= timeout_sec:
                    # In a separate thread, because the disk that it writes to may hang.
                    run_context.start_thread(on_stall).join(_REPORT_SEC)
                    console.leave(StalledError.exit_code)

    kernel_timer = _KernelTimer(timeout_sec)
    kernel_timer.restart(None)  # At once: the block may let no other thread run.
    thread = run_context.start_thread(count_idle_seconds, name="watchdog")
    try:
        yield on_progress
    finally:
        ended.set()
        thread.join()


class _KernelTimer:
    """Writes the stacks of all threads, then ends this process, unless it is restarted in time.

    The first SIGALRM of the timer writes the stacks and restores the default action, with which the
    next one ends the process (code 142). A process that was suspended for longer than the time has
    until then to restart the timer.

    Does nothing without glibc, or where the calling program uses SIGALRM.
    """

    def __init__(self, timeout_sec: float):
        self._grace_sec = min(timeout_sec / 2, _MAX_GRACE_SEC)
        self._first_sec = timeout_sec - self._grace_sec
        self._files = contextlib.ExitStack()
        self._log_file: pathlib.Path | None = None
        # Sets a handler that is called once; Python's `signal` can only set permanent ones.
        self._set_once = getattr(ctypes.CDLL(None), "sysv_signal", None)
        if self._set_once is None or signal.getsignal(signal.SIGALRM) != signal.SIG_DFL:
            self._set_once = None
            return
        self._set_once.restype = ctypes.c_void_p
        self._set_once.argtypes = [ctypes.c_int, ctypes.c_void_p]
        faulthandler.register(signal.SIGALRM, _STANDARD_ERROR, all_threads=True)
        self._write_stacks = self._set_once(signal.SIGALRM, None)

    def restart(self, log_file: pathlib.Path | None) -> None:
        """Starts to count again; the stacks are appended to the file, or to standard error."""
        if self._set_once is None:
            return
        if log_file != self._log_file:
            self._log_file = log_file
            with contextlib.suppress(OSError):  # Keeps the file before.
                file = open(str(log_file), "ab")  # noqa: SIM115
                self._files.callback(file.close)
                faulthandler.register(signal.SIGALRM, file, all_threads=True)
        self._set_once(signal.SIGALRM, self._write_stacks)
        signal.setitimer(signal.ITIMER_REAL, self._first_sec, self._grace_sec)

    def close(self) -> None:
        """Ends the timer."""
        if self._set_once is not None:
            signal.setitimer(signal.ITIMER_REAL, 0)
            faulthandler.unregister(signal.SIGALRM)
        self._files.close()


def dump_stacks(path: pathlib.Path | None) -> None:
    """Appends the stacks of all threads to a file, or to standard error without one."""
    if path is None:
        faulthandler.dump_traceback(_STANDARD_ERROR, all_threads=True)
        return
    with open(path, "ab") as file:
        faulthandler.dump_traceback(file, all_threads=True)
