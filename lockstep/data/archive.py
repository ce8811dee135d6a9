"""Reads and writes the arrays of a `.npz` file one by one; a file that was not finished says so."""

import collections
import contextlib
import functools
import io
import os
import struct
import threading
import weakref
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from lockstep.data.about import Fault, json_of
from lockstep.data.layout import Whole
from lockstep.data.trace import OF_GRADIENTS, OF_VARIABLES, About
from lockstep.numeric.memory import RECENT

try:
    import fcntl
except ImportError:  # Windows has no locks of this kind.
    fcntl = None  # type: ignore[assignment]

Path = str | os.PathLike[str]
ADVICE = "pass a file that a recorder of Lockstep wrote"
_READ_BYTES = 1 << 20  # At a time: they stay in a cache.
KEPT = "kept"  # Kind of an array that has its names by aliases alone.
_GROUPS = dict.fromkeys(OF_VARIABLES, "variable") | dict.fromkeys(OF_GRADIENTS, "gradient")


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
        """Reads the elements to where they belong; their checksum is compared once."""
        array = np.empty(self.shape, self.dtype, order="F" if self.is_transposed else "C")
        with errors_of(self.file):
            info, file = self.archive.getinfo(self.name), self.archive.fp
            # A local header has 30 bytes, then a name and more of the lengths that its end tells.
            lengths, header = bytearray(4), bytearray(self.start)
            _read_at(file, memoryview(lengths), info.header_offset + 26)
            start = info.header_offset + 30 + sum(struct.unpack("<HH", lengths))
            _read_at(file, memoryview(header), start)
            is_checked = self.name in _CHECKED.get(self.archive, ())
            checksum, num = zlib.crc32(header), 0
            while num < array.nbytes:
                part = _bytes_of(array.T if self.is_transposed else array)[num : num + _READ_BYTES]
                if not (more := _read_at(file, part, start + self.start + num)):
                    raise Fault(f"ends within {self.name}; record it again")
                checksum = checksum if is_checked else zlib.crc32(part[:more], checksum)
                num += more
            if not is_checked and checksum != info.CRC:
                raise zipfile.BadZipFile(f"Bad CRC-32 for file {self.name!r}")
        _CHECKED.setdefault(self.archive, set()).add(self.name)
        array.flags.writeable = False
        return array


def _read_at(file: Any, part: memoryview, place: int) -> int:
    """Reads a part of a file; returns the number of bytes.

    Other threads, and processes that were forked, may read the same file at once.
    """
    if isinstance(file, io.BufferedReader) and hasattr(os, "preadv"):
        return os.preadv(file.fileno(), [part], place)
    with _READING:
        file.seek(place)
        return file.readinto(part)


_READING = threading.Lock()


def _bytes_of(array: np.ndarray) -> memoryview:
    """Returns the memory of an array whose elements are one after another, and that has some."""
    return array.reshape(-1).view(np.uint8).data


_CHECKED = weakref.WeakKeyDictionary[zipfile.ZipFile, set[str]]()  # Members that were read.
_IN_USE = weakref.WeakValueDictionary[tuple[zipfile.ZipFile, str], np.ndarray]()


class Arrays(collections.UserDict[str, Any]):
    """Arrays by name; a member of a file is read when it is asked for."""

    def __getitem__(self, name: str) -> np.ndarray:
        array = self.data[name]
        return array.read() if isinstance(array, Member | Whole) else array


class Writer(Arrays):
    """Writes arrays to a new file as they come.

    A variable, or a gradient, that has the bits of the latest array of its index becomes an alias.
    So do the state before a step, which is that after the one before, and copies of weights.

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
        # Group of kinds, and index → dtype, shape and elements, and where they are written.
        self._latest = dict[tuple[str, str], tuple[tuple[Any, ...], Member]]()
        self._num_kept = 0

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
        if not isinstance(array, Member):
            array = self._add(name.partition("/")[2], array, name)
        self.data[name] = array

    def __delitem__(self, name: str) -> None:
        raise ValueError(f"{name} is written already")

    def add(self, place: str, array: np.ndarray) -> Member:
        """Writes an array that may get a name later; without one, no reader sees it.

        Args:
            place: the name without the position of the step, `KIND/ITEM/INDEX`.
            array: the array.
        """
        self._num_kept += 1
        return self._add(place, array, f"1/{KEPT}/{place.split('/')[1]}/{self._num_kept}")

    def forget(self) -> None:
        """Frees the memory of the latest arrays, as further ones are of other steps."""
        self._latest.clear()

    def _add(self, place: str, array: np.ndarray, name: str) -> Member:
        array = np.asarray(array)
        if array.dtype.kind not in "biufSU":
            raise ValueError(f"an array of {array.dtype} cannot be recorded")
        array = array.astype(array.dtype.newbyteorder("<"), copy=False)
        elements = array.tobytes()  # A copy, as the next step or another thread may change them.
        bits = array.dtype, array.shape, elements
        kind, _, index = place.split("/", 2)
        if group := _GROUPS.get(kind):
            latest, member = self._latest.get((group, index), (None, None))
            if member is None or latest != bits:
                member = self._write(name, *bits)
                self._latest[group, index] = bits, member
            return member
        return self._write(name, *bits)

    def _write(self, name: str, dtype: np.dtype, shape: tuple[int, ...], elements: bytes) -> Member:
        header = _header(dtype, shape)
        with self._zip.open(f"{name}.npy", "w", force_zip64=True) as member:
            member.write(header)
            member.write(elements)
        if self._path:
            self._file.flush()  # A process that is forked has nothing left to write.
        return Member(self._path, self._zip, f"{name}.npy", dtype, shape, len(header))

    def close(self, about: About | Mapping[str, Any], renamed: Callable[[str], str] = str) -> None:
        """Writes the description and the index.

        Args:
            about: the description.
            renamed: returns the name of an array in the file for the name here.
        """
        firsts = {renamed(name): x.name.removesuffix(".npy") for name, x in self.data.items()}
        aliases = {name: first for name, first in firsts.items() if name != first}
        self._add("about/0/0", np.array(json_of(about, aliases)), "about")
        self._zip.close()
        self.forget()
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


@functools.lru_cache(maxsize=1024)  # Many arrays have the same one.
def _header(dtype: np.dtype, shape: tuple[int, ...]) -> bytes:
    """Returns what a member has before its elements."""
    header = io.BytesIO()
    keys = {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(header, keys)
    return header.getvalue()


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
