"""Ends a training that makes no progress: hung in a collective, on a disk, on a device."""

import contextlib
import faulthandler
import pathlib
import threading
import time
from collections.abc import Callable, Iterator

from app.runtime import console, run_context
from app.runtime.errors import StalledError

_PERIOD_SEC = 0.5
_REPORT_SEC = 5.0


class Watchdog:
    """A thread that counts the seconds without progress.

    Only seconds in which this process could run count: one that was stopped, or a machine that
    slept, has not stalled.

    Args:
        timeout_sec: how many are too many.
        on_stall: called in that thread, then the process ends with exit code 138.
    """

    def __init__(self, timeout_sec: float, on_stall: Callable[[], None]):
        self._timeout_sec, self._on_stall = timeout_sec, on_stall
        self._idle_sec, self._ended = 0.0, threading.Event()

    def progress(self) -> None:
        """Says that something was done."""
        self._idle_sec = 0.0

    def start(self) -> None:
        """Begins to count."""
        self._thread = run_context.start_thread(self._watch, name="watchdog")

    def end(self) -> None:
        """Ends the watch."""
        self._ended.set()
        self._thread.join()

    def _watch(self) -> None:
        last = time.monotonic()
        while not self._ended.wait(_PERIOD_SEC):
            now = time.monotonic()
            self._idle_sec += min(now - last, 2 * _PERIOD_SEC)
            last = now
            if self._idle_sec >= self._timeout_sec:
                # In a thread of its own: what hangs may be the disk that it is to write to.
                run_context.start_thread(self._on_stall).join(_REPORT_SEC)
                console.leave(StalledError.exit_code)


@contextlib.contextmanager
def watch(timeout_sec: float, on_stall: Callable[[], None]) -> Iterator[Callable[[], None]]:
    """Watches what happens within it.

    Args:
        timeout_sec: see `Watchdog`; 0 watches nothing.
        on_stall: see `Watchdog`.

    Yields:
        A function to call whenever something was done.
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
    """Adds the stacks of all threads to a file, or to standard error where there is none."""
    if path is None:
        faulthandler.dump_traceback(all_threads=True)
        return
    with open(path, "a", encoding="utf-8") as file:
        faulthandler.dump_traceback(file, all_threads=True)
