"""Defines the exceptions that end a command, each with its exit code.

A message says what is wrong, with the value received; then, after a semicolon, what to do.
"""

import errno


class LockstepError(Exception):
    """A failure that is reported in one line; any other exception is a bug (exit code 1)."""

    exit_code = 1

    def __init_subclass__(cls, exit_code: int = 0):
        cls.exit_code = exit_code or cls.exit_code

    def __init__(self, message: str, exit_code: int | None = None):
        super().__init__(message)
        self.exit_code = exit_code or self.exit_code  # An attribute, which pickle keeps.

    @property
    def problem(self) -> str:
        """What is wrong: the message without the advice."""
        return str(self).rpartition("; ")[0] or str(self)


class ConfigError(LockstepError, exit_code=2):
    """A flag, a combination of flags or TF_CONFIG is invalid."""


class DataError(LockstepError, exit_code=3):
    """The dataset is missing, damaged or of the wrong content."""


class CheckpointError(LockstepError, exit_code=4):
    """A checkpoint is unusable or belongs to another configuration."""


class OutputError(LockstepError, exit_code=5):
    """The output directory cannot be used."""


class DeviceError(LockstepError, exit_code=6):
    """The requested devices are not available, or memory ran out."""


class AllReduceError(DeviceError):
    """A collective loses or repeats values of replicas."""


class DivergedError(LockstepError, exit_code=7):
    """The loss or a weight is not finite."""


class DiskFullError(LockstepError, exit_code=8):
    """The disk is full while a record is written."""


class MismatchError(LockstepError, exit_code=9):
    """`verify`, or a verified step of a training, found a mismatch."""


class ReplicaDivergenceError(MismatchError):
    """Replicas hold different weights."""


class PeerLostError(LockstepError, exit_code=138):
    """A worker was lost or did not connect in time; a retry makes sense."""


class StalledError(LockstepError, exit_code=142):  # As of a process that SIGALRM has ended.
    """A training makes no progress; a retry makes sense."""


class Terminated(BaseException):
    """SIGTERM was received. A `BaseException`, like `KeyboardInterrupt`, not to be handled."""


def expected_error(error: BaseException) -> LockstepError | None:
    """Returns the error that an exception is reported as; None for a bug."""
    if isinstance(error, LockstepError):
        return error
    if cause := memory_error(error):
        advice = "use a smaller --global_batch_size or fewer devices"
        return DeviceError(f"out of memory ({reason_of(cause)}); {advice}")
    return None


def memory_error(error: BaseException) -> BaseException | None:
    """Returns the error of memory among an error and those during whose handling it was raised."""
    # Of a function that it traces, TensorFlow raises another one with all frames: the first counts.
    found: BaseException | None = error
    of_memory: BaseException | None = None
    while found is not None and not isinstance(found, LockstepError):
        if (
            isinstance(found, MemoryError)
            or type(found).__name__ == "ResourceExhaustedError"  # TensorFlow is not imported here.
            or getattr(found, "errno", None) == errno.ENOMEM
            or "can't start new thread" in str(found)
        ):
            of_memory = found
        found = found.__cause__ or found.__context__  # TensorFlow raises "from None", too.
    return of_memory


def reason_of(error: BaseException) -> str:
    """Returns the reason of a failure as a short part of a line."""
    text = getattr(error, "strerror", None) or str(error)
    if isinstance(error, KeyError):
        text = f"{text} is missing"
    lines = text.strip().splitlines() or [type(error).__name__]
    return lines[0][:160].rstrip()
