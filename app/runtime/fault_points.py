"""Defines points at which a test can make the program fail: `LOCKSTEP_FAULT=POINT:N:ACTION`.

The action happens when the point is passed for the Nth time; `slow` also at each later point that
writes a file. Without the variable, passing a point does nothing.
"""

import errno
import os
import signal
import time
from collections.abc import Callable, Mapping

from app.runtime import run_context
from app.runtime.errors import ConfigError

VARIABLE = "LOCKSTEP_FAULT"

# Fault points of every file or directory that is written atomically.
_STAGES = ("made", "before_fsync", "before_rename", "after_rename")
_OF_THE_LOOP = ("compile", "step", "evaluate", "epoch")
POINTS = (
    *(f"{kind}.{stage}" for kind in ("checkpoint", "history", "summary") for stage in _STAGES),
    *(f"{kind}.{stage}" for kind in ("config", "accuracy") for stage in _STAGES),
    *("checkpoint.directory", "checkpoint.before_manifest", "checkpoint.between"),
    *("checkpoint.before_delete", "log"),
    *_OF_THE_LOOP,
)
_DELAY_SEC = 3600.0
_SLOW_SEC = 0.2


def _kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _raise() -> None:
    raise RuntimeError(f"an error that {VARIABLE} asks for")


def _fill_disk() -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


ACTIONS: dict[str, Callable[[], None]] = {
    "kill": _kill,
    "raise": _raise,
    "delay": lambda: time.sleep(_DELAY_SEC),
    "enospc": _fill_disk,
    "slow": lambda: time.sleep(_SLOW_SEC),
}
_OF_A_DISK = ("enospc", "slow")


class _Armed:
    """The armed point, and how many more times it must be passed."""

    def __init__(self, point: str, count: int, action: str, perform: Callable[[], None]):
        self._point, self._left = point, count
        self._perform, self._remains = perform, action == "slow"

    def pass_point(self, point: str) -> None:
        self._left -= point == self._point
        if (point == self._point and self._left == 0) or (
            self._remains and self._left <= 0 and point not in _OF_THE_LOOP
        ):
            self._perform()


def arm(environ: Mapping[str, str]) -> str | None:
    """Arms the point that the variable names for the command; returns the value of the variable.

    Without the variable no point is armed, and None is returned.

    Raises:
        ConfigError: the variable names no known point or action, or no count.
    """
    context, text = run_context.required(), environ.get(VARIABLE)
    context.pass_fault_point = None
    if not text:
        return None
    point, _, rest = text.partition(":")
    count, _, action = rest.partition(":")
    action, _, seconds = action.partition("=")
    if (
        point not in POINTS
        or action not in ACTIONS
        or not (count.isascii() and count.isdecimal())
        or int(count) < 1
    ):
        raise ConfigError(
            f"{VARIABLE}={text} must be POINT:N:ACTION, with a point of {', '.join(POINTS)} and an"
            f" action of {', '.join(ACTIONS)}; unset it to train"
        )
    if action in _OF_A_DISK and point in _OF_THE_LOOP:
        raise ConfigError(
            f"{VARIABLE}={text}: {action} needs a point that writes a file, not one of"
            f" {', '.join(_OF_THE_LOOP)}; choose another point"
        )
    perform = ACTIONS[action]
    if seconds:
        perform = _delay(text, action, seconds)
    context.pass_fault_point = _Armed(point, int(count), action, perform).pass_point
    return text


def _delay(text: str, action: str, seconds: str) -> Callable[[], None]:
    try:
        delay_sec = float(seconds)
        if action != "delay" or not 0 <= delay_sec <= _DELAY_SEC:
            raise ValueError
    except ValueError:
        raise ConfigError(
            f"{VARIABLE}={text}: the action must be delay=SECONDS, at most {_DELAY_SEC:g}; unset it"
            " to train"
        ) from None
    return lambda: time.sleep(delay_sec)


def fault_point(point: str) -> None:
    """Marks a point; performs the action that is armed for it, if any."""
    context = run_context.current()
    if context and context.pass_fault_point:
        context.pass_fault_point(point)
