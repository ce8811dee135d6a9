"""One `.npz` file of a trace, read with bounds: never unpickled, never more than was announced.

The zip directory is parsed by `zipfile`. Members are read here, so that each is compared with its
size and its CRC, and so that no file has to stay open between two arrays.
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
    """A file whose directory, `about` and array headers were checked.

    Attributes:
        path: the file.
        about: its description.
        members: the arrays that its names say.
        identity: what tells whether the file was replaced since.
    """

    path: pathlib.Path
    about: About
    members: dict[Key, Member]
    identity: tuple[int, ...]

    @contextlib.contextmanager
    def reading(self) -> Iterator[io.BufferedReader]:
        """Opens the file to read arrays; whatever is wrong with them is a `DataError`."""
        with errors_of(self.path), _open(self.path) as file:
            if _identity(file) != self.identity:
                raise TraceError("was changed while it was read; run the command again")
            yield file


def open_trace_file(path: pathlib.Path) -> TraceFile:
    """Reads the directory, `about` and the headers of all arrays; no array yet.

    Raises:
        DataError: it is no trace, is damaged, or is of a later version.
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
    """Turns everything that reading a damaged file may raise into a `DataError` of one line.

    Raises:
        DataError: it names the file.
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
        return open_regular(pathlib.Path(os.path.realpath(path)))  # A link may name a trace.
    except ValueError as error:
        raise TraceError(
            "is not a regular file; pass a file that a recorder of Lockstep wrote"
        ) from error


def _identity(file: io.BufferedReader) -> tuple[int, ...]:
    status = os.fstat(file.fileno())
    return (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)
