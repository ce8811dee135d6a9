"""Temporary directories of this program; those that a killed process has left are removed.

Each directory holds a file that is locked as long as a process uses the directory. The lock is the
kernel's: it ends with the process, however that ends, and no number of a process can be mistaken.
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
# Of this name: other directories that begin with the prefix, runs for example, are left alone.
_OWNER_FILE = ".lockstep-temporary"


class TemporaryDirectory:
    """A new directory in `TMPDIR`, removed by `cleanup` or on leaving the context.

    Directories in the same place whose processes have ended without `cleanup` are removed first.

    Attributes:
        name: its path.

    Raises:
        DiskFullError: there is no place for it.
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
        """Removes the directory with all that it holds, as far as possible; may be called again."""
        _remove_tree(pathlib.Path(self.name))
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def hold(name: str) -> None:
    """Keeps the directory of another process from being removed as stale while this one lives."""
    with contextlib.suppress(OSError):  # Removed already.
        descriptor = _open_owner_file(pathlib.Path(name))  # Closed when this process ends.
        fcntl.flock(descriptor, fcntl.LOCK_SH)


def remove_stale_directories(parent: pathlib.Path) -> None:
    """Removes this user's temporary directories in `parent` that no living process uses."""
    with contextlib.suppress(OSError):
        for path in parent.glob(f"{_PREFIX}*"):
            with contextlib.suppress(OSError), contextlib.ExitStack() as locks:
                _lock_unused(path, locks)
                _remove_tree(path)


def _create_owner_file(directory: pathlib.Path) -> int:
    """Creates the owner file, locked before it gets its name, and returns its descriptor."""
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    unnamed = directory / f"{_OWNER_FILE}.new"
    descriptor = os.open(unnamed, flags, 0o600)
    with contextlib.suppress(OSError):  # A file system without locks: nothing is found stale there.
        fcntl.flock(descriptor, fcntl.LOCK_SH)
    unnamed.rename(directory / _OWNER_FILE)
    return descriptor


def _open_owner_file(directory: pathlib.Path) -> int:
    flags = os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    return os.open(directory / _OWNER_FILE, flags)


def _lock_unused(directory: pathlib.Path, locks: contextlib.ExitStack) -> None:
    """Locks a directory and those within it, which processes that it started have made.

    Raises:
        OSError: a process uses one of them, or it is not a temporary directory of this user.
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
    """Removes a directory, its owner file last: what an interruption leaves is still found."""
    with contextlib.suppress(OSError):
        for entry in directory.iterdir():
            if entry.is_dir() and not entry.is_symlink():
                shutil.rmtree(entry, ignore_errors=True)
            elif entry.name != _OWNER_FILE:
                with contextlib.suppress(OSError):
                    entry.unlink()
    shutil.rmtree(directory, ignore_errors=True)
