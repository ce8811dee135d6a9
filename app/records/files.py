"""Writes files atomically, and reads files without trusting their content."""

import contextlib
import errno
import io
import json
import os
import pathlib
import shutil
import stat
from collections.abc import Iterator, Mapping
from typing import Any

from app.runtime.errors import DiskFullError, LockstepError, OutputError

_MAX_JSON_BYTES = 64 << 20
TEMPORARY = ".lockstep-"  # The names of all temporary files and folders begin like this.


def write_file(path: pathlib.Path, content: str | bytes) -> None:
    """Writes a file; after a crash at any point it is what it was before, or complete.

    Raises:
        DiskFullError: no space; the temporary file is removed.
        OutputError: it cannot be written for another reason.
    """
    data = content.encode() if isinstance(content, str) else content
    temporary = temporary_path(path)
    try:
        with io_errors_as(path, len(data)):
            temporary.write_bytes(data)
        publish(temporary, path, len(data))
    except BaseException:
        with contextlib.suppress(LockstepError):
            remove(temporary)
        raise


def write_json(path: pathlib.Path, value: Mapping[str, Any]) -> None:
    """Writes a record as indented JSON, atomically."""
    write_file(path, json.dumps(value, indent=2) + "\n")


def publish(temporary: pathlib.Path, path: pathlib.Path, size_bytes: int | None = None) -> None:
    """Renames a complete file, or a directory, to `path`; content and name are on disk then.

    Raises:
        DiskFullError, OutputError: it cannot be written.
    """
    with io_errors_as(path, size_bytes):
        for written in [temporary, *sorted(temporary.rglob("*"))]:
            fsync(written)
        os.replace(temporary, path)
        fsync(path.parent)


def temporary_path(path: pathlib.Path) -> pathlib.Path:
    """Returns the temporary path beside `path` of this process."""
    return path.with_name(f"{TEMPORARY}{os.getpid()}-{path.name}")


def write_error(path: pathlib.Path, error: OSError, size_bytes: int | None = None) -> LockstepError:
    """Returns the error for a failed write of `path`: `DiskFullError` or `OutputError`."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        existing = next(parent for parent in path.absolute().parents if parent.exists())
        file_system = os.statvfs(existing)
        needed = f"{size_bytes:,} bytes needed, " if size_bytes else ""
        free = f"{file_system.f_bavail * file_system.f_frsize:,} free"
        if file_system.f_files and not file_system.f_favail:
            free += ", but no file more can be made there"
        return DiskFullError(
            f"{path}: {error.strerror}, {needed}{free}; make room, then run the same command again"
        )
    return OutputError(f"{path}: {error.strerror}; choose another directory with --out")


@contextlib.contextmanager
def io_errors_as(path: pathlib.Path, size_bytes: int | None = None) -> Iterator[None]:
    """Converts errors of changing `path` to the program's exceptions.

    Args:
        path: the file or directory.
        size_bytes: size of what is written, for the message if the disk is full.

    Raises:
        DiskFullError, OutputError: see `write_error`.
    """
    try:
        yield
    except OSError as error:
        raise write_error(path, error, size_bytes) from error


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
        OSError: see `open_regular`.
        ValueError: the file is not regular, not UTF-8, or larger than `max_bytes`.
    """
    with open_regular(path) as file:
        size_bytes = os.fstat(file.fileno()).st_size
        if size_bytes > max_bytes:
            raise ValueError(f"{path.name} is larger than {max_bytes:,} bytes")
        return file.read(size_bytes).decode()


def read_json(path: pathlib.Path, max_bytes: int = _MAX_JSON_BYTES) -> Any:
    """Reads a JSON file of at most `max_bytes`.

    Raises:
        OSError, ValueError: see `read_text`; or the file is not JSON.
    """
    try:
        return json.loads(read_text(path, max_bytes))
    except RecursionError as error:
        raise ValueError(f"{path.name} is nested too deeply") from error


def remove(path: pathlib.Path) -> None:
    """Removes a file, a link or a directory tree, if it exists.

    Raises:
        OutputError: it cannot be removed.
    """
    with io_errors_as(path):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                path.unlink()


def make_directory(path: pathlib.Path) -> None:
    """Creates a directory and its parents, if they do not exist, durably.

    Raises:
        OSError: it cannot be created.
    """
    missing = [p for p in (path, *path.parents) if not p.is_dir()]
    path.mkdir(parents=True, exist_ok=True)
    for made in missing:
        fsync(made.parent)


def fsync(path: pathlib.Path) -> None:
    """Flushes the content of a file, or the entries of a directory, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
