"""Defines the exceptions that end a command, each with its exit code.

A message says what is wrong, with the value received; then, after a semicolon, what to do.
"""

import errno
import pathlib
import re
import resource

_MAX_REASON = 160
# How Python reports that there is no memory for the stack of a thread.
_NO_THREAD = "can't start new thread"
# The C library takes address space in pieces of this size; what needs more, fails earlier.
_MAX_UNUSED_BYTES = 64 << 20


class LockstepError(Exception):
    """A failure that is reported in one line; any other exception is a bug (exit code 1)."""

    exit_code = 1

    def __init__(self, message: str, exit_code: int | None = None):
        super().__init__(message)
        if exit_code is not None:
            self.exit_code = exit_code

    @property
    def problem(self) -> str:
        """What is wrong: the message without the advice."""
        return str(self).rpartition("; ")[0] or str(self)

    @property
    def advice(self) -> str:
        """What to do, the part after the last semicolon; "" without one."""
        problem, _, advice = str(self).rpartition("; ")
        return advice if problem else ""

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        """Makes the exception picklable with its exit code."""
        return type(self), (str(self), self.exit_code)


class ConfigError(LockstepError):
    """A flag or a combination of flags is invalid."""

    exit_code = 2


class DataError(LockstepError):
    """The dataset is missing, damaged or of the wrong content."""

    exit_code = 3


class CheckpointError(LockstepError):
    """A checkpoint is unusable or belongs to another configuration."""

    exit_code = 4


class OutputError(LockstepError):
    """The output directory cannot be used."""

    exit_code = 5


class DeviceError(LockstepError):
    """The requested devices are not available."""

    exit_code = 6


class AllReduceError(LockstepError):
    """A collective loses or repeats values of replicas."""

    exit_code = 6


class ReplicaDivergenceError(LockstepError):
    """Replicas hold different weights."""

    exit_code = 9


class DivergedError(LockstepError):
    """The loss or a weight is not finite."""

    exit_code = 7


class DiskFullError(LockstepError):
    """The disk is full while a record is written."""

    exit_code = 8


class MismatchError(LockstepError):
    """`verify`, or a verified step of a training, found a mismatch."""

    exit_code = 9


class PeerLostError(LockstepError):
    """A worker was lost or did not connect in time; a retry makes sense."""

    exit_code = 138


class StalledError(LockstepError):
    """A training makes no progress; a retry makes sense."""

    exit_code = 142  # As of a process that SIGALRM has ended.


class Terminated(BaseException):
    """SIGTERM was received. A `BaseException`, like `KeyboardInterrupt`, not to be handled."""


INTERRUPTED_EXIT_CODE = 130
TERMINATED_EXIT_CODE = 143


def expected_error(error: Exception) -> LockstepError | None:
    """Returns the error that an exception is reported as; None for a bug.

    An unexpected error is one of memory if it came when none was left: at the limit of the address
    space (`ulimit -v`), native code fails in many ways, and few name the cause.
    """
    if isinstance(error, LockstepError):
        return error
    cause = memory_error(error)
    if cause is None and not _is_address_space_used_up():
        return None
    return DeviceError(
        f"out of memory ({reason_of(cause or error)}); use a smaller --global_batch_size or fewer"
        " devices"
    )


def _is_address_space_used_up() -> bool:
    """Returns whether this process has used all of its address space, as far as the system says."""
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit == resource.RLIM_INFINITY:
        return False
    try:
        status = pathlib.Path("/proc/self/status").read_text(encoding="ascii")
        (peak_kib,) = re.findall(r"^VmPeak:\s+(\d+) kB$", status, re.MULTILINE)
    except (OSError, ValueError):
        return False
    return limit - int(peak_kib) * 1024 < _MAX_UNUSED_BYTES


def memory_error(error: BaseException) -> BaseException | None:
    """Returns the error of memory among an error and those during whose handling it was raised.

    TensorFlow raises errors of a function that it traces again, as another class.

    Returns:
        An error of Python or TensorFlow, or None.
    """
    found: BaseException | None = error
    while found is not None and not isinstance(found, LockstepError):  # That has its cause.
        # By name, so that TensorFlow is not imported. A full disk is a ResourceExhaustedError, too.
        if (
            isinstance(found, MemoryError)
            or type(found).__name__ == "ResourceExhaustedError"
            or (isinstance(found, RuntimeError) and str(found) == _NO_THREAD)
            or (isinstance(found, OSError) and found.errno == errno.ENOMEM)
        ):
            return found
        found = found.__cause__ or found.__context__  # TensorFlow raises "from None", too.
    return None


def reason_of(error: BaseException) -> str:
    """Returns the reason of a failure as a short part of a line."""
    text = getattr(error, "strerror", None) or str(error) or type(error).__name__
    if isinstance(error, KeyError):
        text = f"{text} is missing"
    line = text.strip().splitlines()[0] if text.strip() else type(error).__name__
    return line if len(line) <= _MAX_REASON else f"{line[:_MAX_REASON]}…"
