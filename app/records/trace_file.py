"""Reads one `.npz` file of a trace, within limits and without unpickling.

`zipfile` parses the zip directory. This module reads the members, so that each is compared with its
size and its CRC, and the file is open only while an array is read.
"""

import contextlib
import dataclasses
import io
import os
import pathlib
from collections.abc import Iterator

from app.records.files import open_regular
from app.records.trace_about import About, parse_about
from app.records.trace_directory import ABOUT, Key, parse_name, read_directory
from app.records.trace_member import Member, read_header, read_text_member
from app.records.trace_values import TraceError, printable
from app.runtime.errors import DataError, reason_of


@dataclasses.dataclass(frozen=True)
class TraceFile:
    """A file with checked directory, `about` and array headers.

    Attributes:
        path: the file.
        about: description of the trace.
        members: the arrays by name.
        identity: values that change if the file is replaced.
    """

    path: pathlib.Path
    about: About
    members: dict[Key, Member]
    identity: tuple[int, ...]

    @contextlib.contextmanager
    def reading(self) -> Iterator[io.BufferedReader]:
        """Opens the file to read arrays; raises any error as `DataError`."""
        with errors_of(self.path), _open(self.path) as file:
            if _identity(file) != self.identity:
                raise TraceError("was changed while it was read; run the command again")
            yield file


def open_trace_file(path: pathlib.Path) -> TraceFile:
    """Reads the directory, `about` and the headers of all arrays, but no arrays.

    Raises:
        DataError: the file is not a trace, is damaged, or is of a later version.
    """
    with errors_of(path), _open(path) as file:
        directory = read_directory(file)
        if ABOUT not in directory:
            raise TraceError(
                "is not a trace (it has no member 'about'); pass a file that a recorder of"
                " Lockstep wrote"
            )
        about = parse_about(read_text_member(file, directory.pop(ABOUT)))
        members = {parse_name(m.name): read_header(file, m) for m in directory.values()}
        return TraceFile(path, about, members, _identity(file))


@contextlib.contextmanager
def errors_of(path: pathlib.Path) -> Iterator[None]:
    """Converts all exceptions of reading a damaged file to a `DataError` of one line.

    Raises:
        DataError: names the file.
    """
    name = printable(str(path))
    try:
        yield
    except TraceError as error:
        raise DataError(f"{name}: {printable(str(error))}") from error
    except OSError as error:
        raise DataError(
            f"{name}: cannot be read ({reason_of(error)}); pass a file that a recorder of Lockstep"
            " wrote"
        ) from error
    except MemoryError as error:
        raise DataError(
            f"{name}: needs more memory than there is; record fewer steps or a smaller batch"
        ) from error
    except ValueError as error:
        reason = printable(reason_of(error))
        raise DataError(f"{name}: is damaged ({reason}); record it again") from error


def _open(path: pathlib.Path) -> io.BufferedReader:
    try:
        return open_regular(pathlib.Path(os.path.realpath(path)))  # A link may point to a trace.
    except ValueError as error:
        raise TraceError(
            "is not a regular file; pass a file that a recorder of Lockstep wrote"
        ) from error


def _identity(file: io.BufferedReader) -> tuple[int, ...]:
    status = os.fstat(file.fileno())
    return (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)
