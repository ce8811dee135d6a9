"""Ends a training without progress, which hangs in a collective, on a disk or on a device."""

import contextlib
import faulthandler
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import IO

from app.runtime import console
from app.runtime.errors import LockstepError

_PERIOD_SEC = 0.5
_STANDARD_ERROR = 2
# Where no Python code can run, the kernel ends the process so much later: its timer runs while
# the process is suspended, which for a minute must not end it.
_GRACE_SEC = 90.0


@contextlib.contextmanager
def watch(timeout_sec: float, stalled: LockstepError) -> Iterator[Callable[[], None]]:
    """Ends the process if the block of a `with` statement makes no progress.

    A thread counts the seconds in which this process could run, writes the stacks of all threads to
    the log, or to standard error without one, and reports the error. Native code that holds
    Python's global lock stops the thread, too: the C code of `faulthandler` then writes the stacks,
    and SIGALRM of the kernel ends the process, which a shell reports as code 142.

    Args:
        timeout_sec: seconds without progress that count as a stall; 0 for no limit.
        stalled: error with which the process ends.

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
        faulthandler.dump_traceback_later(timeout_sec + _GRACE_SEC - 1, file=file)
        signal.setitimer(signal.ITIMER_REAL, timeout_sec + _GRACE_SEC)

    def count_idle_seconds() -> None:
        nonlocal idle_sec
        last = time.monotonic()
        while not ended.wait(_PERIOD_SEC):
            now = time.monotonic()
            idle_sec += min(now - last, 2 * _PERIOD_SEC)
            last = now
            if idle_sec >= timeout_sec:
                _end(stalled, file)

    path = console.log_file()
    with contextlib.ExitStack() as stack:
        file = stack.enter_context(open(path, "ab")) if path else _STANDARD_ERROR
        stack.callback(signal.setitimer, signal.ITIMER_REAL, 0)
        stack.callback(faulthandler.cancel_dump_traceback_later)
        stack.callback(ended.set)
        on_progress()  # At once: the block may let no other thread run.
        threading.Thread(target=count_idle_seconds, daemon=True, name="watchdog").start()
        yield on_progress


def _end(stalled: LockstepError, file: int | IO[bytes]) -> None:
    """Reports the error, writes the stacks, and ends the process.

    The last line is printed before anything is written to the log, as its disk may hang.
    """
    if file == _STANDARD_ERROR:
        faulthandler.dump_traceback(file)
        console.leave(console.report_error(stalled))
    exit_code = console.report_error(stalled)
    faulthandler.dump_traceback(file)
    console.leave(exit_code)
