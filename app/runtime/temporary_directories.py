"""Creates temporary directories, and removes those of killed processes.

A process holds a lock on each of its directories, which the kernel releases when the process ends.
"""

import contextlib
import fcntl
import os
import pathlib
import shutil
import tempfile
import time

from app.runtime.errors import DiskFullError, reason_of

_PREFIX = "lockstep-tmp-"
_MIN_AGE_SEC = 1.0  # A directory gets its lock just after it was created.


class TemporaryDirectory:
    """A new directory in `TMPDIR`, removed by `cleanup` or on leaving the context.

    Directories in the same place whose processes have ended without `cleanup` are removed first.

    Attributes:
        name: its path.

    Raises:
        DiskFullError: there is no space for it.
    """

    def __init__(self) -> None:
        try:
            remove_stale_directories(pathlib.Path(tempfile.gettempdir()))
            self.name = tempfile.mkdtemp(prefix=_PREFIX)
            self._descriptor = os.open(self.name, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise DiskFullError(
                f"cannot create a temporary directory: {reason_of(error)}; free disk space, or set"
                " TMPDIR to another directory"
            ) from error
        with contextlib.suppress(OSError):  # A file system without locks.
            fcntl.flock(self._descriptor, fcntl.LOCK_SH)

    def __enter__(self) -> str:
        return self.name

    def __exit__(self, *exception: object) -> None:
        self.cleanup()

    def cleanup(self) -> None:
        """Removes the directory and its contents, as far as possible; can be called again."""
        shutil.rmtree(self.name, ignore_errors=True)
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def remove_stale_directories(parent: pathlib.Path) -> None:
    """Removes this user's temporary directories in `parent` that no process has locked."""
    for path in parent.glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError), contextlib.ExitStack() as stack:
            descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
            stack.callback(os.close, descriptor)
            status = os.fstat(descriptor)
            if status.st_uid == os.geteuid() and status.st_ctime < time.time() - _MIN_AGE_SEC:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(path, ignore_errors=True)
