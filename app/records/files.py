"""Files that are never seen half-written, and are read without trust."""

import contextlib
import errno
import io
import json
import os
import pathlib
import shutil
import stat
from collections.abc import Callable, Iterator
from typing import Any

from app.runtime.errors import DiskFullError, LockstepError, OutputError
from app.runtime.fault_points import fault_point

_MAX_JSON_BYTES = 64 << 20


def write_atomically(
    path: pathlib.Path,
    write: Callable[[pathlib.Path], None],
    *,
    size_bytes: int,
    points: str | None = None,
) -> None:
    """Lets `write` fill a temporary neighbour of `path`, then gives it its name.

    Content and name are on the disk when this returns; after a crash at any point there is either
    the old file or the new one.

    Args:
        path: the final name.
        write: called with the temporary path; it may make a file or a directory there.
        size_bytes: what it takes on the disk, to be told where there is no room.
        points: the fault points to pass, by default those of the file's name.

    Raises:
        DiskFullError: no space; the temporary one is removed.
        OutputError: any other reason why it cannot be written.
    """
    temporary, points = temporary_path(path), points or path.stem
    replaced = replaced_path(path)
    try:
        write(temporary)
        fault_point(f"{points}.before_fsync")
        for written in [temporary, *sorted(temporary.rglob("*"))]:
            fsync(written)
        fault_point(f"{points}.before_rename")
        if temporary.is_dir() and path.is_dir():  # Not in one go: see `recover_replaced`.
            remove(replaced)
            path.rename(replaced)
            fault_point(f"{points}.between")
        os.replace(temporary, path)
        fault_point(f"{points}.after_rename")
        fsync(path.parent)
        remove(replaced)
    except BaseException as error:
        with contextlib.suppress(OSError):
            if replaced.is_dir() and not path.exists():
                replaced.rename(path)  # What was there before is there again.
            remove(temporary)
        if isinstance(error, OSError):
            raise write_error(path, error, size_bytes) from error
        raise


def write_file(path: pathlib.Path, content: str | bytes) -> None:
    """Writes a file, whole or not at all.

    Raises:
        What `write_atomically` raises.
    """
    data = content.encode() if isinstance(content, str) else content

    def write(temporary: pathlib.Path) -> None:
        with open(temporary, "wb") as file:
            fault_point(f"{path.stem}.made")
            file.write(data)

    write_atomically(path, write, size_bytes=len(data))


def write_json(path: pathlib.Path, value: object) -> None:
    """Writes `value` as JSON, indented, whole or not at all."""
    write_file(path, json.dumps(value, indent=2) + "\n")


def write_error(path: pathlib.Path, error: OSError, size_bytes: int | None = None) -> LockstepError:
    """Returns what to raise when writing `path` has failed: `DiskFullError` or `OutputError`."""
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
    """Returns the nearest place above `path` that is there."""
    return next(parent for parent in path.absolute().parents if parent.exists())


def temporary_path(path: pathlib.Path) -> pathlib.Path:
    """Returns the neighbour of `path` in which this process prepares what is to be there."""
    return path.with_name(f".{path.name}.{os.getpid()}.tmp")


def replaced_path(path: pathlib.Path) -> pathlib.Path:
    """Returns where a directory lies for the moment in which another one takes its name."""
    return path.with_name(f".{path.name}.replaced")


def recover_replaced(parent: pathlib.Path) -> None:
    """Gives directories their names back that a crash left without the one that was to follow."""
    for replaced in parent.glob(".step-*.replaced"):
        path = parent / replaced.name.removeprefix(".").removesuffix(".replaced")
        if path.exists():
            remove(replaced)
        else:
            replaced.rename(path)


def open_regular(path: pathlib.Path) -> io.BufferedReader:
    """Opens a file for reading bytes, if it is one: no link elsewhere, no pipe that never ends.

    Raises:
        OSError: it is not there, a link, or cannot be read.
        ValueError: it is no regular file.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise ValueError(f"{path.name} is not a regular file")
    return open(descriptor, "rb")


def read_text(path: pathlib.Path, max_bytes: int = _MAX_JSON_BYTES) -> str:
    """Reads a record of at most `max_bytes`.

    Raises:
        OSError: see `open_regular`.
        ValueError: it is no regular file, larger than that, or no UTF-8.
    """
    with open_regular(path) as file:
        size_bytes = os.fstat(file.fileno()).st_size
        if size_bytes > max_bytes:
            raise ValueError(f"{path.name} is larger than {max_bytes:,} bytes")
        return file.read(size_bytes).decode()


def read_json(path: pathlib.Path, max_bytes: int = _MAX_JSON_BYTES) -> Any:
    """Reads a JSON file of at most `max_bytes`.

    Raises:
        OSError: see `open_regular`.
        ValueError: it holds anything else.
    """
    try:
        return json.loads(read_text(path, max_bytes))
    except RecursionError as error:
        raise ValueError(f"{path.name} is nested too deeply") from error


def remove(path: pathlib.Path) -> None:
    """Removes a file, a link or a whole directory, if it is there.

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
    """Turns whatever keeps something at `path` from being changed into an error of ours.

    Raises:
        DiskFullError, OutputError: see `write_error`.
    """
    try:
        yield
    except OSError as error:
        raise write_error(path, error) from error


def make_directory(path: pathlib.Path) -> None:
    """Makes a directory and its parents, where they are not there, so that they stay.

    Raises:
        OSError: it cannot be made.
    """
    missing = [p for p in (path, *path.parents) if not p.is_dir()]
    path.mkdir(parents=True, exist_ok=True)
    for made in missing:
        fsync(made.parent)


def fsync(path: pathlib.Path) -> None:
    """Has what is in a file, or which names are in a directory, on the disk when it returns."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
