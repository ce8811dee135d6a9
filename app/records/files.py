"""Writes files atomically, and reads files without trusting their content."""

import contextlib
import ctypes
import errno
import io
import json
import os
import pathlib
import shutil
import stat
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from app.records.check_value import with_check, without_check
from app.runtime.errors import DiskFullError, LockstepError, OutputError
from app.runtime.fault_points import fault_point

_MAX_JSON_BYTES = 64 << 20
_LIBC = ctypes.CDLL(None, use_errno=True)
# Of Linux: <fcntl.h>, <linux/fs.h>.
_AT_FDCWD, _RENAME_EXCHANGE = -100, 2
_CANNOT_EXCHANGE = {errno.ENOSYS, errno.EINVAL, errno.ENOTSUP}


def write_atomically(
    path: pathlib.Path,
    write: Callable[[pathlib.Path], None],
    *,
    size_bytes: int,
    points: str | None = None,
) -> None:
    """Calls `write` with a temporary path beside `path`, then renames the result to `path`.

    Content and name are on disk when this returns; after a crash at any point there is either the
    old file or the new one.

    Args:
        path: the final name.
        write: called with the temporary path; may create a file or a directory there.
        size_bytes: required size, for the message if the disk is full.
        points: fault points to pass, by default those of the file's name.

    Raises:
        DiskFullError: no space; the temporary file is removed.
        OutputError: it cannot be written for another reason.
    """
    temporary, points = temporary_path(path), points or path.stem
    replaced = replaced_path(path)
    try:
        write(temporary)
        fault_point(f"{points}.before_fsync")
        _fsync_tree(temporary)
        fault_point(f"{points}.before_rename")
        replaces_directory = temporary.is_dir() and path.is_dir()
        if not (replaces_directory and _exchange(temporary, path)):
            if replaces_directory:  # Not atomic; see `recover_replaced`.
                remove(replaced)
                path.rename(replaced)
                fault_point(f"{points}.between")
            os.replace(temporary, path)
        fault_point(f"{points}.after_rename")
        fsync(path.parent)
        remove(temporary)  # After an exchange, the previous directory.
        remove(replaced)
    except BaseException as error:
        with contextlib.suppress(OSError):
            if replaced.is_dir() and not path.exists():
                replaced.rename(path)  # Restore the previous directory.
            remove(temporary)
        if isinstance(error, OSError):
            raise write_error(path, error, size_bytes) from error
        raise


def _exchange(path: pathlib.Path, other: pathlib.Path) -> bool:
    """Exchanges two names atomically; returns False if the system cannot.

    Raises:
        OSError: it fails for another reason.
    """
    renameat2 = getattr(_LIBC, "renameat2", None)
    if renameat2 is None:
        return False
    names = os.fsencode(path), os.fsencode(other)
    if not renameat2(_AT_FDCWD, names[0], _AT_FDCWD, names[1], _RENAME_EXCHANGE):
        return True
    number = ctypes.get_errno()
    if number in _CANNOT_EXCHANGE:
        return False
    raise OSError(number, os.strerror(number), str(other))


def publish_directory(temporary: pathlib.Path, path: pathlib.Path) -> None:
    """Renames a complete directory to `path`, which does not exist, durably.

    Raises:
        DiskFullError, OutputError: it cannot be written.
    """
    with io_errors_as(path):
        _fsync_tree(temporary)
        temporary.rename(path)
        fsync(path.parent)


def write_file(path: pathlib.Path, content: str | bytes) -> None:
    """Writes a file atomically.

    Raises:
        The exceptions of `write_atomically`.
    """
    data = content.encode() if isinstance(content, str) else content

    def write(temporary: pathlib.Path) -> None:
        with open(temporary, "wb") as file:
            fault_point(f"{path.stem}.made")
            file.write(data)

    write_atomically(path, write, size_bytes=len(data))


def write_json(path: pathlib.Path, value: Mapping[str, Any]) -> None:
    """Writes a record as indented JSON with a check value, atomically."""
    write_file(path, json.dumps(with_check(value), indent=2) + "\n")


def write_error(path: pathlib.Path, error: OSError, size_bytes: int | None = None) -> LockstepError:
    """Returns the error for a failed write of `path`: `DiskFullError` or `OutputError`."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        file_system = os.statvfs(_existing(path))
        needed = f"{size_bytes:,} bytes needed, " if size_bytes else ""
        free = f"{file_system.f_bavail * file_system.f_frsize:,} free"
        if file_system.f_files and not file_system.f_favail:
            free += ", but no file more can be made there"
        return DiskFullError(
            f"{path}: {error.strerror}, {needed}{free}; make room, then run the same command again"
        )
    return OutputError(f"{path}: {error.strerror}; choose another directory with --out")


def _existing(path: pathlib.Path) -> pathlib.Path:
    """Returns the nearest existing parent of `path`."""
    return next(parent for parent in path.absolute().parents if parent.exists())


def temporary_path(path: pathlib.Path) -> pathlib.Path:
    """Returns the temporary path beside `path` of this process."""
    return path.with_name(f".{path.name}.{os.getpid()}.tmp")


def replaced_path(path: pathlib.Path) -> pathlib.Path:
    """Returns the path of a directory while another one takes its name."""
    return path.with_name(f".{path.name}.replaced")


def recover_replaced(parent: pathlib.Path, names: str) -> None:
    """Restores directories that a crash left renamed before their replacement had their name.

    Args:
        parent: their parent.
        names: pattern of their names.
    """
    for replaced in parent.glob(f".{names}.replaced"):
        path = parent / replaced.name.removeprefix(".").removesuffix(".replaced")
        if path.exists():
            remove(replaced)
        else:
            replaced.rename(path)


def open_regular(path: pathlib.Path) -> io.BufferedReader:
    """Opens a file for reading bytes, if it is a regular file: no link, no pipe.

    Raises:
        OSError: the file does not exist, is a link, or cannot be read.
        ValueError: it is not a regular file.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise ValueError(f"{path.name} is not a regular file")
    return open(descriptor, "rb")


def read_text(path: pathlib.Path, max_bytes: int = _MAX_JSON_BYTES) -> str:
    """Reads a record of at most `max_bytes` as text.

    Raises:
        OSError, ValueError: see `read_bytes`; or the file is not UTF-8.
    """
    return read_bytes(path, max_bytes).decode()


def read_bytes(path: pathlib.Path, max_bytes: int = _MAX_JSON_BYTES) -> bytes:
    """Reads a record of at most `max_bytes`.

    Raises:
        OSError: see `open_regular`.
        ValueError: the file is not regular, or is larger than `max_bytes`.
    """
    with open_regular(path) as file:
        size_bytes = os.fstat(file.fileno()).st_size
        if size_bytes > max_bytes:
            raise ValueError(f"{path.name} is larger than {max_bytes:,} bytes")
        return file.read(size_bytes)


def read_json(path: pathlib.Path, max_bytes: int = _MAX_JSON_BYTES) -> Any:
    """Reads a JSON file of at most `max_bytes`, without its check value.

    Raises:
        OSError: see `open_regular`.
        ValueError: it holds anything else, or has changed since it was written.
    """
    try:
        return without_check(json.loads(read_text(path, max_bytes)))
    except RecursionError as error:
        raise ValueError(f"{path.name} is nested too deeply") from error


def remove(path: pathlib.Path) -> None:
    """Removes a file, a link or a directory tree, if it exists.

    Raises:
        OSError: it cannot be removed.
    """
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            path.unlink()


@contextlib.contextmanager
def io_errors_as(path: pathlib.Path) -> Iterator[None]:
    """Converts errors of changing `path` to the program's exceptions.

    Raises:
        DiskFullError, OutputError: see `write_error`.
    """
    try:
        yield
    except OSError as error:
        raise write_error(path, error) from error


def make_directory(path: pathlib.Path) -> None:
    """Creates a directory and its parents, if they do not exist, durably.

    Raises:
        OSError: it cannot be created.
    """
    missing = [p for p in (path, *path.parents) if not p.is_dir()]
    path.mkdir(parents=True, exist_ok=True)
    for made in missing:
        fsync(made.parent)


def _fsync_tree(path: pathlib.Path) -> None:
    """Flushes a file, or a directory with everything in it."""
    for written in [path, *sorted(path.rglob("*"))]:
        fsync(written)


def fsync(path: pathlib.Path) -> None:
    """Flushes the content of a file, or the entries of a directory, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
