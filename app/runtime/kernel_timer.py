"""Ends a process in which no Python code can run, by a timer of the kernel.

Native code that waits for a lock while it holds Python's global lock stops every Python thread,
those that handle signals and watch for progress included.
"""

import contextlib
import ctypes
import faulthandler
import os
import pathlib
import signal
import sys
import time

_SIGNAL = signal.SIGVTALRM  # SIGALRM is that of `signals`.
# A process that was suspended finds the time passed; within these seconds it restarts the timer.
_GRACE_SEC = 30
_SA_RESETHAND = 0x80000000
_STANDARD_ERROR = 2
_LIBC = ctypes.CDLL(None)


class _Event(ctypes.Structure):
    """`struct sigevent` of Linux; notification 0 sends a signal."""

    _fields_ = (
        ("value", ctypes.c_void_p),
        ("signal", ctypes.c_int),
        ("notification", ctypes.c_int),
        ("rest", ctypes.c_char * 48),
    )


class _Times(ctypes.Structure):
    """`struct itimerspec`."""

    _fields_ = (
        ("interval_sec", ctypes.c_long),
        ("interval_nsec", ctypes.c_long),
        ("first_sec", ctypes.c_long),
        ("first_nsec", ctypes.c_long),
    )


class _Action(ctypes.Structure):
    """`struct sigaction` of the C libraries of Linux."""

    _fields_ = (
        ("handler", ctypes.c_void_p),
        ("mask", ctypes.c_char * 128),
        ("flags", ctypes.c_uint),
        ("restorer", ctypes.c_void_p),
    )


class KernelTimer:
    """Ends this process by a signal, unless it is restarted in time.

    When the time has passed, the stacks of all threads are written; 30 seconds later the process
    ends by `SIGVTALRM`, which a shell shows as code 154. Linux only; does nothing on other systems,
    or where the program that calls this one uses that signal.

    Args:
        timeout_sec: seconds until the stacks are written.
    """

    def __init__(self, timeout_sec: float):
        self._timeout_sec = timeout_sec
        self._path: pathlib.Path | None = None
        self._files = contextlib.ExitStack()
        self._timer = _create()
        if self._timer is not None:
            faulthandler.register(_SIGNAL, _STANDARD_ERROR, all_threads=True)
            self._action = _Action()
            _LIBC.sigaction(_SIGNAL, None, ctypes.byref(self._action))
            # The first signal restores the default action, so that the next one ends the process.
            self._action.flags |= _SA_RESETHAND

    def restart(self, log_file: pathlib.Path | None) -> None:
        """Starts to count again.

        Args:
            log_file: file to append the stacks to; None for standard error.
        """
        if self._timer is None:
            return
        if log_file != self._path:
            self._write_to(log_file)
        _LIBC.sigaction(_SIGNAL, ctypes.byref(self._action), None)
        first_sec = int(self._timeout_sec)
        times = _Times(_GRACE_SEC, 0, first_sec, int((self._timeout_sec - first_sec) * 1e9))
        _LIBC.timer_settime(self._timer, 0, ctypes.byref(times), None)

    def close(self) -> None:
        """Ends the timer and restores what the signal did before."""
        if self._timer is not None:
            _LIBC.timer_delete(self._timer)
            faulthandler.unregister(_SIGNAL)
        self._files.close()

    def _write_to(self, path: pathlib.Path | None) -> None:
        """Opens the file for the stacks; keeps the one before if that fails."""
        self._path = path
        if path:
            with contextlib.suppress(OSError):
                file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW)
                self._files.callback(os.close, file)
                faulthandler.register(_SIGNAL, file, all_threads=True)


def _create() -> ctypes.c_void_p | None:
    """Creates a timer that sends the signal to this process; None if that is impossible."""
    if sys.platform != "linux" or signal.getsignal(_SIGNAL) != signal.SIG_DFL:
        return None
    timer, event = ctypes.c_void_p(), _Event(signal=_SIGNAL)
    with contextlib.suppress(AttributeError):  # Older C libraries have it in another library.
        if not _LIBC.timer_create(time.CLOCK_MONOTONIC, ctypes.byref(event), ctypes.byref(timer)):
            return timer
    return None
