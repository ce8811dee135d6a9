"""Reads and checks the zip directory of a trace's `.npz` file."""

import dataclasses
import io
import os
import re
import zipfile
from typing import Any

from app.records.trace_member import LOCAL_HEADER, Member
from app.records.trace_values import TraceError, printable, shown
from app.runtime.errors import reason_of

ABOUT = "about.npy"

_MAX_MEMBERS = 250_000
_MAX_DIRECTORY_BYTES = 128 * _MAX_MEMBERS  # Names in traces are short.
_MAX_RATIO = 1000  # Deflate reaches 1032.
_ENCRYPTED = 0x1 | 0x40 | 0x2000
_NUMBER = r"(0|[1-9]\d{0,8})"
_NAME = re.compile(
    rf"{_NUMBER}/([a-z_]{{1,40}})/{_NUMBER}/{_NUMBER}(?:/(values|indices|rows))?\.npy", re.ASCII
)


@dataclasses.dataclass(frozen=True, slots=True)
class Key:
    """A parsed member name: `POSITION/KIND/REPLICA/INDEX`, and the part of `Rows`."""

    position: int
    kind: str
    replica: int
    index: int
    part: str


class _Directory:
    """A file of which `zipfile` reads only a directory of bounded size."""

    def __init__(self, file: io.BufferedReader):
        self._file = file
        self.seek, self.tell = file.seek, file.tell

    def read(self, size: int = -1) -> bytes:
        left = max(os.fstat(self._file.fileno()).st_size - self._file.tell(), 0)
        size = left if size < 0 else min(size, left)
        if size > _MAX_DIRECTORY_BYTES:
            raise TraceError(f"has more than {_MAX_MEMBERS:,} members; record fewer steps")
        return self._file.read(size)


def read_directory(file: io.BufferedReader) -> dict[str, Member]:
    """Reads names, positions and sizes of all members, within limits.

    Raises:
        TraceError: the file is not an `.npz` file, is damaged, or has unknown members.
    """
    start, size_bytes = file.read(4), os.fstat(file.fileno()).st_size
    if start != LOCAL_HEADER:
        raise TraceError(
            "is not a trace (it is no .npz file); pass a file that a recorder of Lockstep wrote"
        )
    try:
        bounded: Any = _Directory(file)
        infos = zipfile.ZipFile(bounded).infolist()
    except (TraceError, MemoryError):
        raise
    except Exception as error:  # A damaged directory may raise any exception.
        raise TraceError(
            f"is truncated or damaged ({printable(reason_of(error))}); copy it again, or record it"
            " again"
        ) from error
    if len(infos) > _MAX_MEMBERS:
        raise TraceError(f"has more than {_MAX_MEMBERS:,} members; record fewer steps")
    if sum(info.compress_size for info in infos) > size_bytes:
        raise TraceError("has members that are larger than the file; record it again")
    if sum(info.file_size for info in infos) > _MAX_RATIO * size_bytes:
        raise TraceError(
            f"would be more than {_MAX_RATIO:,} times as large uncompressed; record it again"
        )
    members: dict[str, Member] = {}
    for info in infos:
        if not 0 <= info.header_offset < size_bytes:
            raise TraceError(
                f"has a member {shown(info.filename)} outside of the file; record it again"
            )
        if info.filename in members:
            raise TraceError(f"has the member {shown(info.filename)} twice; record it again")
        members[info.filename] = _member(info)
    return members


def _member(info: zipfile.ZipInfo) -> Member:
    if info.orig_filename != ABOUT and not _NAME.fullmatch(info.orig_filename):
        raise TraceError(
            f"has a member {shown(info.orig_filename)}, which no trace has; pass a file that a"
            " recorder of Lockstep wrote"
        )
    if info.flag_bits & _ENCRYPTED:
        raise TraceError(f"has the encrypted member {info.filename!r}; save it without encryption")
    if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        raise TraceError(
            f"has the member {info.filename!r} with compression {info.compress_type}; save it with"
            " np.savez or np.savez_compressed"
        )
    compressed = info.compress_type == zipfile.ZIP_DEFLATED
    sizes = info.compress_size, info.file_size
    if min(sizes) < 0 or (not compressed and sizes[0] != sizes[1]):
        raise TraceError(f"has the member {info.filename!r} with two sizes; record it again")
    return Member(info.filename, info.header_offset, compressed, *sizes, info.CRC)


def parse_name(name: str) -> Key:
    """Parses the name of a member that `read_directory` returned."""
    match = _NAME.fullmatch(name)
    assert match is not None  # Checked by `read_directory`.
    position, kind, replica, index, part = match.groups()
    return Key(int(position), kind, int(replica), int(index), part or "")
