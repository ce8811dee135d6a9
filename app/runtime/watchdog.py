"""Ends a training without progress, which hangs in a collective, on a disk or on a device."""

import contextlib
import faulthandler
import pathlib
import threading
import time
from collections.abc import Callable, Iterator

from app.runtime import console, run_context
from app.runtime.errors import StalledError
from app.runtime.kernel_timer import KernelTimer

_PERIOD_SEC = 0.5
_REPORT_SEC = 5.0


class Watchdog:
    """Counts the seconds without progress, in a thread.

    Only seconds in which this process could run count, so that a suspended process or machine does
    not count as stalled. If not even this thread can run for that long, the kernel ends the process
    (`KernelTimer`).

    Args:
        timeout_sec: seconds without progress that count as a stall.
        on_stall: called in that thread; then the process exits with code 138.
    """

    def __init__(self, timeout_sec: float, on_stall: Callable[[], None]):
        self._timeout_sec, self._on_stall = timeout_sec, on_stall
        self._idle_sec, self._ended = 0.0, threading.Event()

    def progress(self) -> None:
        """Resets the count."""
        self._idle_sec = 0.0

    def start(self) -> None:
        """Starts to count."""
        self._thread = run_context.start_thread(self._watch, name="watchdog")

    def end(self) -> None:
        """Stops to count."""
        self._ended.set()
        self._thread.join()

    def _watch(self) -> None:
        last = time.monotonic()
        context = run_context.current()
        with contextlib.closing(KernelTimer(self._timeout_sec)) as kernel_timer:
            while not self._ended.wait(_PERIOD_SEC):
                kernel_timer.restart(context.log_file if context else None)
                now = time.monotonic()
                self._idle_sec += min(now - last, 2 * _PERIOD_SEC)
                last = now
                if self._idle_sec >= self._timeout_sec:
                    # In a separate thread, because the disk that it writes to may hang.
                    run_context.start_thread(self._on_stall).join(_REPORT_SEC)
                    console.leave(StalledError.exit_code)


@contextlib.contextmanager
def watch(timeout_sec: float, on_stall: Callable[[], None]) -> Iterator[Callable[[], None]]:
    """Watches the block of a `with` statement.

    Args:
        timeout_sec: see `Watchdog`; 0 to disable it.
        on_stall: see `Watchdog`.

    Yields:
        A function to call whenever there is progress.
    """
    if not timeout_sec:
        yield lambda: None
        return
    watchdog = Watchdog(timeout_sec, on_stall)
    watchdog.start()
    try:
        yield watchdog.progress
    finally:
        watchdog.end()


def dump_stacks(path: pathlib.Path | None) -> None:
    """Appends the stacks of all threads to a file, or to standard error without one."""
    if path is None:
        faulthandler.dump_traceback(all_threads=True)
        return
    with open(path, "a", encoding="utf-8") as file:
        faulthandler.dump_traceback(file, all_threads=True)
