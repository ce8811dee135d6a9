"""Writes files so that a crash at any point leaves the old content or the new one, never a part."""

import contextlib
import errno
import json
import os
import pathlib
import shutil
import stat
from collections.abc import Iterator, Mapping
from typing import Any

from app.errors import DiskFullError, LockstepError, OutputError, reason_of

TEMPORARY = ".lockstep-"  # The names of all temporary files and folders begin like this.


def write_file(path: pathlib.Path, content: str | bytes) -> None:
    """Writes a file; raises DiskFullError without space, OutputError for another reason."""
    data = content.encode() if isinstance(content, str) else content
    temporary = temporary_path(path)
    try:
        with io_errors_as(path, len(data)):
            temporary.write_bytes(data)
            fsync(temporary)
            os.replace(temporary, path)
            fsync(path.parent)
    except BaseException:
        with contextlib.suppress(LockstepError):
            remove(temporary)
        raise


def write_json(path: pathlib.Path, value: Mapping[str, Any]) -> None:
    """Writes a record as indented JSON, atomically."""
    write_file(path, json.dumps(value, indent=2) + "\n")


def temporary_path(path: pathlib.Path) -> pathlib.Path:
    """Returns the temporary path beside `path` of this process."""
    return path.with_name(f"{TEMPORARY}{os.getpid()}-{path.name}")


@contextlib.contextmanager
def io_errors_as(path: pathlib.Path, size_bytes: int = 0) -> Iterator[None]:
    """Converts errors of writing `size_bytes` to `path` to DiskFullError or OutputError."""
    try:
        yield
    except OSError as error:
        problem = f"{path}: {error.strerror}"
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            advice = "choose another directory with --out"
            if error.errno == errno.EFBIG:
                advice = "raise the limit of file sizes, as with ulimit -f unlimited"
            raise OutputError(f"{problem}; {advice}") from error
        free = shutil.disk_usage(next(p for p in path.absolute().parents if p.exists())).free
        needed = f"{size_bytes:,} bytes needed, " if size_bytes else ""
        advice = "make room, then run the same command again"
        raise DiskFullError(f"{problem}, {needed}{free:,} free; {advice}") from error


@contextlib.contextmanager
def damage_as_error(path: pathlib.Path) -> Iterator[None]:
    """Converts errors of reading a damaged record, whose values have any type, to OutputError."""
    try:
        yield
    except (OSError, ArithmeticError, AttributeError, LookupError, TypeError, ValueError,
            RecursionError) as error:  # fmt: skip
        raise OutputError(
            f"{path}: not readable as {path.name} ({reason_of(error)}); run its command again,"
            " which writes it again, or leave this directory out"
        ) from error


def read_bytes(path: pathlib.Path) -> bytes:
    """Reads a regular file; raises OSError for a link, ValueError for a pipe."""
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    with open(os.open(path, flags), "rb") as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise ValueError(f"{path.name} is not a regular file")
        return file.read()


def read_json(path: pathlib.Path) -> Any:
    """Reads a JSON file; raises as `read_bytes`, ValueError or RecursionError if it is none."""
    return json.loads(read_bytes(path))


def remove(path: pathlib.Path) -> None:
    """Removes a file, a link or a directory tree, if it exists; raises OutputError otherwise."""
    with io_errors_as(path):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                path.unlink()


def make_directory(path: pathlib.Path) -> None:
    """Creates a directory and its parents, if they do not exist, durably."""
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
