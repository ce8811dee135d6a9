"""Reads and writes the arrays of a `.npz` file one by one; a file that was not finished says so."""

import collections
import contextlib
import errno
import functools
import io
import os
import struct
import weakref
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from lockstep.data.about import Fault, json_of
from lockstep.data.layout import Whole
from lockstep.data.trace import About
from lockstep.numeric.memory import RECENT

try:
    import fcntl
except ImportError:  # Windows has no locks of this kind.
    fcntl = None  # type: ignore[assignment]

Path = str | os.PathLike[str]
ADVICE = "pass a file that a recorder of Lockstep wrote"
_READ_BYTES = 1 << 20  # At a time: they stay in a cache.
_CHUNK_BYTES = 1 << 16  # Compared or written at a time: little memory beside a step.
_SUMMED_BYTES = 1 << 12  # Of a larger array, as many spread over it.
_MOST_ALIKE = 8  # Arrays of one checksum that another is compared with.
KEPT = "kept"  # Kind of an array that has its names by aliases alone.


class TraceError(ValueError):
    """A file is not a trace, or is damaged; the text is one line with the file and advice."""


# What reading a damaged file raises; any other error is one of this program.
_OF_FILES = (
    *(Fault, OSError, MemoryError, EOFError, ValueError, RuntimeError, struct.error),
    *(zipfile.BadZipFile, NotImplementedError),
)


@contextlib.contextmanager
def errors_of(name: str) -> Iterator[None]:
    """Raises an error of reading a file, which may be damaged anywhere, as a `TraceError`."""
    try:
        yield
    except TraceError:
        raise
    except _OF_FILES as error:
        line = f"{name}: {_text_of(error)}"
        raise TraceError("".join(c if c.isprintable() else repr(c)[1:-1] for c in line)) from error


def _text_of(error: Exception) -> str:
    if isinstance(error, Fault):
        return str(error)
    if isinstance(error, MemoryError):
        return "needs more memory than there is; record fewer steps or a smaller batch"
    if isinstance(error, OSError):
        text = f"cannot be read ({error.strerror or error})"
    else:
        reason = str(error).partition("\n")[0][:200] or type(error).__name__
        text = f"is no .npz file or is damaged ({reason})"
    return f"{text}; {ADVICE}"


class Member(NamedTuple):
    """An array in a file.

    Attributes:
        file: name of the file in messages.
        archive: the open file.
        name: name of the member, with suffix.
        dtype, shape: of the array.
        start: number of bytes before its elements.
        is_transposed: whether the first axis varies fastest, as in Fortran.
    """

    file: str
    archive: zipfile.ZipFile
    name: str
    dtype: np.dtype
    shape: tuple[int, ...]
    start: int
    is_transposed: bool = False

    def read(self) -> np.ndarray:
        """Returns the array, which cannot be written; a wrong checksum raises a `TraceError`.

        While it is in use, it is not read again.
        """
        place = self.archive, self.name
        if (known := _IN_USE.get(place)) is None:
            known = _IN_USE[place] = self._read()
        return RECENT.get(place, lambda: known)

    def _read(self) -> np.ndarray:
        with errors_of(self.file):
            array = np.empty(self.shape, self.dtype, order="F" if self.is_transposed else "C")
            elements = _bytes_of(array.T if self.is_transposed else array) if array.nbytes else None
            if elements is not None and not self._read_at_once(elements):
                self._read_in_parts(elements)
        _CHECKED.setdefault(self.archive, set()).add(self.name)
        array.flags.writeable = False
        return array

    def _read_in_parts(self, elements: memoryview) -> None:
        """Reads the elements to where they belong; a wrong checksum is an error of the module."""
        num = 0
        with self.archive.open(self.name) as member:
            member.read(self.start)
            while part := member.read(min(len(elements) - num, _READ_BYTES)):
                elements[num : num + len(part)] = part
                num += len(part)
            if num < len(elements) or member.read(1):
                raise Fault(f"has other sizes in {self.name} than its index; record it again")

    def _read_at_once(self, elements: memoryview) -> bool:
        """Reads the elements from a file to where they belong; returns whether it could.

        Their checksum is compared once: a wrong one is left to the module for these files.
        """
        info, file = self.archive.getinfo(self.name), self.archive.fp
        if not (isinstance(file, io.BufferedReader) and hasattr(os, "preadv")):  # As in Windows.
            return False
        number, start = file.fileno(), info.header_offset
        # A local header has 30 bytes, then a name and more of the lengths that its end tells.
        start += 30 + sum(struct.unpack("<HH", os.pread(number, 4, start + 26)))
        is_checked = self.name in _CHECKED.get(self.archive, ())
        checksum, num = zlib.crc32(os.pread(number, self.start, start)), 0
        while num < len(elements):
            part = elements[num : num + _READ_BYTES]
            if not (more := os.preadv(number, [part], start + self.start + num)):
                return False
            checksum = checksum if is_checked else zlib.crc32(part[:more], checksum)
            num += more
        return is_checked or checksum == info.CRC


def _bytes_of(array: np.ndarray) -> memoryview:
    """Returns the memory of an array whose elements are one after another, and that has some."""
    return array.reshape(-1).view(np.uint8).data


def _chunks_of(array: np.ndarray) -> Iterator[bytes]:
    """Yields copies of the elements, a part at a time."""
    for start in range(0, array.nbytes, _CHUNK_BYTES):
        yield bytes(_bytes_of(array)[start : start + _CHUNK_BYTES])


def _checksum(array: np.ndarray) -> int:
    """Returns a number that arrays have in common if they are equal, and few others."""
    if not array.nbytes:
        return 0
    elements = array.reshape(-1).view(np.uint8)
    return zlib.crc32(elements[:: 1 + array.nbytes // _SUMMED_BYTES].tobytes())


_CHECKED = weakref.WeakKeyDictionary[zipfile.ZipFile, set[str]]()  # Members that were read.
_IN_USE = weakref.WeakValueDictionary[tuple[zipfile.ZipFile, str], np.ndarray]()


class Arrays(collections.UserDict[str, Any]):
    """Arrays by name; a member of a file is read when it is asked for."""

    def __getitem__(self, name: str) -> np.ndarray:
        array = self.data[name]
        return array.read() if isinstance(array, Member | Whole) else array


class Writer(Arrays):
    """Writes arrays to a new file as they come; one that repeats earlier bits becomes an alias.

    The file has its index at the end: without `close`, also if the process is killed, `load` says
    that it was not finished. A `with` block that is left without `close` removes it. A file that
    has the path is replaced at once, since it belongs to an earlier training.

    Args:
        target: path of the file, or an open file such as `io.BytesIO`.

    Raises:
        BlockingIOError: another process writes this file.
        OSError: the file cannot be written; any method may raise it.
        ValueError: an array has a dtype that no reader takes, as complex numbers.
    """

    def __init__(self, target: Path | BinaryIO):
        super().__init__()
        self._path = os.fspath(target) if isinstance(target, str | os.PathLike) else ""
        self._file: Any = _open_alone(self._path) if self._path else target
        self._zip = zipfile.ZipFile(self._file, "w")
        # Dtype, shape and checksum → the latest arrays, with other elements each.
        latest = functools.partial(collections.deque[Member], maxlen=_MOST_ALIKE)
        self._firsts = collections.defaultdict[tuple[Any, ...], collections.deque[Member]](latest)
        self._offsets = dict[str, int]()  # Member → bytes of the file before its elements.
        self._num_kept: collections.Counter[int] = collections.Counter()

    def __enter__(self) -> "Writer":
        return self

    def __exit__(self, *_: object) -> None:
        if self._path and not self._file.closed:
            self.abandon()
            os.unlink(self._path)

    def __del__(self) -> None:
        if hasattr(self, "_zip"):
            self._zip.fp = None  # Otherwise, `ZipFile` writes an index when it is collected.

    def __setitem__(self, name: str, array: np.ndarray | Member) -> None:
        """Writes an array by a name; or gives a name to one that `add` has written."""
        self.data[name] = array if isinstance(array, Member) else self._add(array, name)

    def __delitem__(self, name: str) -> None:
        raise ValueError(f"{name} is written already")

    def add(self, array: np.ndarray, item: int) -> Member:
        """Writes an array that may get a name later; without one, no reader sees it.

        Args:
            array: the array.
            item: a shard or copy of this file.
        """
        found = self._add(array, name := f"1/{KEPT}/{item}/{self._num_kept[item]}")
        self._num_kept[item] += found.name == f"{name}.npy"
        return found

    def _add(self, array: np.ndarray, name: str) -> Member:
        array = np.asarray(array)
        if array.dtype.kind not in "biufSU":
            raise ValueError(f"an array of {array.dtype} cannot be recorded")
        array = np.ascontiguousarray(array, array.dtype.newbyteorder("<")).reshape(array.shape)
        firsts = self._firsts[array.dtype, array.shape, _checksum(array)]
        first = next((member for member in firsts if self._has(member, array)), None)
        if first is None:
            firsts.append(first := self._write(name, array))
        return first

    def _has(self, member: Member, array: np.ndarray) -> bool:
        """Returns whether the elements of a member, as they are in the file, are those.

        It moves the position in the file, which `ZipFile` sets before it writes a member.
        """
        if not (array.nbytes and self._file.readable()):
            return not array.nbytes
        self._file.seek(self._offsets[member.name])
        try:
            for own in _chunks_of(array):
                written = self._file.read(len(own))
                if len(written) < len(own):
                    raise OSError(errno.EIO, "another program shortened the file")
                if written != own:
                    return False
            return True
        finally:
            self._file.flush()  # A process that is forked has nothing that it read ahead.

    def _write(self, name: str, array: np.ndarray) -> Member:
        header = io.BytesIO()
        header_data = np.lib.format.header_data_from_array_1_0(array)
        np.lib.format.write_array_header_1_0(header, header_data)
        with self._zip.open(f"{name}.npy", "w", force_zip64=True) as member:
            member.write(header.getvalue())
            if self._file.readable():
                self._offsets[f"{name}.npy"] = self._file.tell()
            for chunk in _chunks_of(array):  # Another thread may change the array meanwhile.
                member.write(chunk)
        if self._path:
            self._file.flush()  # A process that is forked has nothing left to write.
        where = self._path, self._zip, f"{name}.npy"
        return Member(*where, array.dtype, array.shape, header.tell())

    def close(self, about: About | Mapping[str, Any], renamed: Callable[[str], str] = str) -> None:
        """Writes the description and the index.

        Args:
            about: the description.
            renamed: returns the name of an array in the file for the name here.
        """
        firsts = {renamed(name): x.name.removesuffix(".npy") for name, x in self.data.items()}
        aliases = {name: first for name, first in firsts.items() if name != first}
        self._write("about", np.array(json_of(about, aliases)))
        self._zip.close()
        if self._path:
            self._file.flush()
            os.fsync(self._file.fileno())  # A power cut leaves the whole file, or no index.
            self._file.close()

    def abandon(self) -> None:
        """Ends a file that cannot be finished: it is empty, and `load` says so."""
        self._zip.fp = None
        with contextlib.suppress(OSError):  # It may fail to write what is left.
            self._file.close()
        with contextlib.suppress(OSError):
            os.truncate(self._path, 0)


def _open_alone(path: str) -> BinaryIO:
    """Opens a new, empty file that no other process writes; who reads an older one keeps that."""
    while True:
        number = os.open(path, os.O_RDWR | os.O_CREAT | getattr(os, "O_BINARY", 0), 0o666)
        file = os.fdopen(number, "r+b")
        try:
            _lock(file)
            own = os.fstat(number)
            if os.path.exists(path) and os.path.samestat(own, os.stat(path)):
                if not own.st_size:
                    return file
                os.unlink(path)
        except BaseException:
            file.close()
            raise
        file.close()


def _lock(file: BinaryIO) -> None:
    """Locks a file until it is closed; file systems without locks are let through."""
    if fcntl is None:
        return
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError) as error:
        raise BlockingIOError(*error.args) from None
    except OSError:
        pass


def require_finished(file: BinaryIO) -> None:
    """Raises a `Fault` if a file has the begin of a recording, and not its index.

    Args:
        file: the open file.
    """
    file.seek(0)
    if file.read(4) in (b"", b"PK\3\4") and not zipfile.is_zipfile(file):
        raise Fault(
            "the recording was not finished: the training was killed or is still running, the disk"
            " was full, or the file is truncated; record it again"
        )
