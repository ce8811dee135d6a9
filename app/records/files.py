"""Writing files so that nothing partial is ever seen under a final name."""

import contextlib
import errno
import json
import os
import pathlib
import shutil
from collections.abc import Callable

from app.errors import DiskFullError, LockstepError, OutputError


def write_atomically(path: pathlib.Path, write: Callable[[pathlib.Path], None]) -> None:
    """Lets `write` fill a temporary neighbour of `path`, then gives it its name.

    Content and name are on the disk when this returns; after a crash at any point there is either
    the old file or the new one.

    Args:
        path: the final name.
        write: called with the temporary path; it may make a file or a directory there.

    Raises:
        DiskFullError: no space; the temporary one is removed.
        OutputError: any other reason why it cannot be written.
    """
    temporary = temporary_path(path)
    try:
        write(temporary)
        for written in [temporary, *sorted(temporary.rglob("*"))]:
            _fsync(written)
        os.replace(temporary, path)
        _fsync(path.parent)
    except OSError as error:
        _remove(temporary)
        raise write_error(path, error) from error
    except BaseException:
        _remove(temporary)
        raise


def write_error(path: pathlib.Path, error: OSError) -> LockstepError:
    """Returns what to raise when writing `path` has failed: `DiskFullError` or `OutputError`."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        free = shutil.disk_usage(path.parent).free
        return DiskFullError(
            f"{path}: {error.strerror}, {free:,} bytes free — space for the file is required;"
            " make room, then run the same command again"
        )
    return OutputError(
        f"{path}: {error.strerror} — a place that can be written to is required; give another one"
        " with --out"
    )


def temporary_path(path: pathlib.Path) -> pathlib.Path:
    """Returns the neighbour of `path` in which this process prepares what is to be there."""
    return path.with_name(f".{path.name}.{os.getpid()}.tmp")


def write_json(path: pathlib.Path, value) -> None:
    """Writes `value` as JSON, indented, whole or not at all."""
    text = json.dumps(value, indent=2) + "\n"
    write_atomically(path, lambda temporary: temporary.write_text(text, encoding="utf-8"))


def _fsync(path: pathlib.Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _remove(path: pathlib.Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with contextlib.suppress(OSError):  # What could not be made is not there.
            path.unlink()
