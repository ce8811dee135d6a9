"""Creates temporary directories, and removes those of killed processes.

Each directory holds a file that is locked while a process uses the directory. The kernel releases
the lock when the process ends; unlike a process id, a lock cannot be mistaken.
"""

import contextlib
import fcntl
import os
import pathlib
import shutil
import stat
import tempfile

from app.runtime.errors import DiskFullError, reason_of

_PREFIX = "lockstep-"
# Only names of this form: other directories with the prefix, such as runs, are not touched.
_OWNER_FILE = ".lockstep-temporary"


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
            self._descriptor = _create_owner_file(pathlib.Path(self.name))
        except OSError as error:
            raise DiskFullError(
                f"cannot create a temporary directory: {reason_of(error)}; free disk space, or set"
                " TMPDIR to another directory"
            ) from error

    def __enter__(self) -> str:
        return self.name

    def __exit__(self, *exception: object) -> None:
        self.cleanup()

    def cleanup(self) -> None:
        """Removes the directory and its contents, as far as possible; can be called again."""
        _remove_tree(pathlib.Path(self.name))
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def hold(name: str) -> None:
    """Keeps the directory of another process from being removed while this process lives."""
    with contextlib.suppress(OSError):  # Removed already.
        descriptor = _open_owner_file(pathlib.Path(name))  # Closed when this process ends.
        fcntl.flock(descriptor, fcntl.LOCK_SH)


def remove_stale_directories(parent: pathlib.Path) -> None:
    """Removes this user's temporary directories in `parent` that no process uses."""
    with contextlib.suppress(OSError):
        for path in parent.glob(f"{_PREFIX}*"):
            with contextlib.suppress(OSError), contextlib.ExitStack() as locks:
                _lock_unused(path, locks)
                _remove_tree(path)


def _create_owner_file(directory: pathlib.Path) -> int:
    """Creates the owner file, locks it before it gets its name, and returns its descriptor."""
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    unnamed = directory / f"{_OWNER_FILE}.new"
    descriptor = os.open(unnamed, flags, 0o600)
    with contextlib.suppress(OSError):  # Without file locks, no directory counts as stale.
        fcntl.flock(descriptor, fcntl.LOCK_SH)
    unnamed.rename(directory / _OWNER_FILE)
    return descriptor


def _open_owner_file(directory: pathlib.Path) -> int:
    flags = os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    return os.open(directory / _OWNER_FILE, flags)


def _lock_unused(directory: pathlib.Path, locks: contextlib.ExitStack) -> None:
    """Locks a directory and those within it, created by child processes.

    Raises:
        OSError: a directory is in use, or is not a temporary directory of this user.
    """
    status = directory.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid():
        raise PermissionError(f"{directory} belongs to another user")
    descriptor = _open_owner_file(directory)
    locks.callback(os.close, descriptor)
    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    for nested in directory.glob(f"{_PREFIX}*/{_OWNER_FILE}"):
        _lock_unused(nested.parent, locks)


def _remove_tree(directory: pathlib.Path) -> None:
    """Removes a directory, its owner file last, so that an interrupted removal can be repeated."""
    with contextlib.suppress(OSError):
        for entry in directory.iterdir():
            if entry.is_dir() and not entry.is_symlink():
                shutil.rmtree(entry, ignore_errors=True)
            elif entry.name != _OWNER_FILE:
                with contextlib.suppress(OSError):
                    entry.unlink()
    shutil.rmtree(directory, ignore_errors=True)
