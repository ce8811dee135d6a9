"""Reads members of a trace's `.npz` file, within the sizes of the zip directory."""

import dataclasses
import io
import math
import os
import re
import struct
import zlib

import numpy as np

from app.records.trace_values import TraceError

# NumPy's names of allowed dtypes: little-endian numbers, no objects, no structures.
DTYPES = (
    *("|b1", "|i1", "|u1", "<i2", "<u2", "<i4", "<u4", "<i8", "<u8"),
    *("<f2", "<f4", "<f8"),
)
LOCAL_HEADER = b"PK\x03\x04"

_MAX_TEXT_BYTES = 64 << 20
_MAX_HEADER_BYTES = 1024
_MAX_ELEMENTS = 2**48
_CHUNK_BYTES = 1 << 20
_HEADER = re.compile(
    r"\{'descr': '([^']{1,20})', 'fortran_order': (True|False),"
    r" 'shape': \(((?:\d{1,15}, ?)*(?:\d{1,15},?)?)\), \} *\n",
    re.ASCII,
)
_MAGIC = b"\x93NUMPY\x01\x00"


@dataclasses.dataclass(frozen=True, slots=True)
class Member:
    """A member of the archive; dtype and shape are set once its header was read."""

    name: str
    offset: int
    compressed: bool
    stored_bytes: int
    size_bytes: int
    crc: int
    dtype: str = ""
    is_fortran: bool = False
    shape: tuple[int, ...] = ()
    header_bytes: int = 0


def read_array(file: io.BufferedReader, member: Member) -> np.ndarray:
    """Reads one array and compares its size and CRC with the zip directory.

    Raises:
        TraceError: they differ.
    """
    shape = member.shape[::-1] if member.is_fortran else member.shape
    array = np.empty(shape, np.dtype(member.dtype))
    content = array.reshape(-1).view(np.uint8)
    stream = _Stream(file, member)
    stream.read(member.header_bytes)
    for start in range(0, content.size, _CHUNK_BYTES):
        chunk = content[start : start + _CHUNK_BYTES]
        chunk[:] = np.frombuffer(stream.read(chunk.size), np.uint8)
    stream.finish()
    if member.dtype == "|b1" and content.size and content.max() > 1:
        raise _damaged(member, "has truth values other than 0 and 1")
    return array.T if member.is_fortran else array


def read_text_member(file: io.BufferedReader, member: Member) -> str:
    """Reads a member with a single text.

    Raises:
        TraceError: it is another array, too long, or damaged.
    """
    if member.size_bytes > _MAX_TEXT_BYTES:
        raise TraceError(
            f"has an 'about' of {member.size_bytes:,} bytes, more than {_MAX_TEXT_BYTES:,}; record"
            " it again"
        )
    stream = _Stream(file, member)
    header_bytes, descr, _, shape = _parse_header(stream, member)
    match = re.fullmatch(r"<U(\d{1,9})", descr, re.ASCII)
    size_bytes = member.size_bytes - header_bytes
    if match is None or shape != () or 4 * int(match[1]) != size_bytes:
        raise TraceError("has an 'about' that is not one text; record it again")
    text = b"".join(
        stream.read(min(_CHUNK_BYTES, size_bytes - at)) for at in range(0, size_bytes, _CHUNK_BYTES)
    )
    stream.finish()
    return text.decode("utf-32-le").rstrip("\0")  # NumPy pads with zeros.


def read_header(file: io.BufferedReader, member: Member) -> Member:
    """Returns the member with dtype and shape, checked against its size.

    Raises:
        TraceError: it is not a plain array of numbers, or has another size.
    """
    stream = _Stream(file, member)
    header_bytes, descr, is_fortran, shape = _parse_header(stream, member)
    if descr not in DTYPES:
        raise _damaged(
            member,
            f"has dtype {descr!r}, which no trace has",
            "record numbers of at most 64 bits (bfloat16 as float32)",
        )
    size = math.prod(max(length, 1) for length in shape)
    if len(shape) > 32 or size > _MAX_ELEMENTS:
        raise _damaged(member, "has an impossible shape")
    expected = header_bytes + math.prod(shape) * np.dtype(descr).itemsize
    if expected != member.size_bytes:
        raise _damaged(member, f"has {member.size_bytes:,} of {expected:,} bytes")
    return dataclasses.replace(
        member, dtype=descr, is_fortran=is_fortran, shape=shape, header_bytes=header_bytes
    )


def _parse_header(stream: "_Stream", member: Member) -> tuple[int, str, bool, tuple[int, ...]]:
    """Returns size in bytes, dtype, whether in Fortran order, and shape; does not evaluate code."""
    start = stream.read(10)
    length = int.from_bytes(start[8:], "little")
    if not start.startswith(_MAGIC) or length > _MAX_HEADER_BYTES:
        raise _damaged(member, "is no array in NumPy's format 1.0")
    match = _HEADER.fullmatch(stream.read(length).decode("latin-1"))
    if match is None:
        raise _damaged(
            member, "is no plain array", "record numbers only, no objects and no structures"
        )
    shape = tuple(int(part) for part in match[3].replace(" ", "").split(",") if part)
    return 10 + length, match[1], match[2] == "True", shape


def _damaged(member: Member, wrong: str, advice: str = "record it again") -> TraceError:
    return TraceError(f"the member {member.name!r} {wrong}; {advice}")


class _Stream:
    """The uncompressed bytes of a member."""

    def __init__(self, file: io.BufferedReader, member: Member):
        self._file, self._member, self._crc = file, member, 0
        self._remaining, self._unread = member.stored_bytes, b""
        self._inflater = zlib.decompressobj(-15) if member.compressed else None
        file.seek(member.offset)
        header = file.read(30)
        if len(header) < 30 or not header.startswith(LOCAL_HEADER):
            raise _damaged(member, "is not where the directory says")
        name_bytes, extra_bytes = struct.unpack("<HH", header[26:])
        if file.read(name_bytes) != member.name.encode():
            raise _damaged(member, "has another name in the directory")
        file.seek(extra_bytes, os.SEEK_CUR)

    def read(self, size: int) -> bytes:
        """Returns exactly `size` bytes."""
        data = self._stored(size) if self._inflater is None else self._inflated(size)
        if len(data) != size:
            raise _damaged(self._member, "is truncated or damaged")
        self._crc = zlib.crc32(data, self._crc)
        return data

    def _stored(self, size: int) -> bytes:
        data = self._file.read(min(size, self._remaining))
        self._remaining -= len(data)
        return data

    def _inflated(self, size: int) -> bytes:
        assert self._inflater is not None
        parts: list[bytes] = []
        while size > 0 and not self._inflater.eof:
            data = self._unread or self._stored(1 << 16)
            try:
                inflated = self._inflater.decompress(data, size)
            except zlib.error as error:
                raise _damaged(self._member, "is damaged") from error
            if not data and not inflated:
                break
            parts.append(inflated)
            self._unread = self._inflater.unconsumed_tail
            size -= len(inflated)
        return b"".join(parts)

    def finish(self) -> None:
        """Checks the CRC, and that no bytes follow."""
        if self._inflater is None:
            is_whole = not self._remaining
        else:
            is_whole = not self._inflated(1) and self._inflater.eof
        if not is_whole or self._crc != self._member.crc:
            raise _damaged(self._member, "is damaged (its CRC differs)")
