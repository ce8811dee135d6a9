"""Arrays in one file: `.npz`, stored as they are, and believed in nothing when they are read.

`numpy.load` reads what is written here. Reading is our own, because a file that someone made up may
hold pickled code, name members outside of itself or announce arrays larger than any memory.
"""

import math
import pathlib
import zipfile
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from app.records.files import open_regular
from app.runtime.fault_points import fault_point

# What variables of models and optimizers can be. No objects: those would be pickled.
DTYPES = {
    *("bool", "float16", "float32", "float64", "int8", "int16", "int32", "int64"),
    *("uint8", "uint16", "uint32", "uint64"),
}
_MAX_RANK = 8
_MAX_HEADER_BYTES = 4096  # Of an array in the file, and of its entry in the list at the end.


class ArraySpec(NamedTuple):
    """What an array has to be: shape and the name of its dtype."""

    shape: tuple[int, ...]
    dtype: str

    @classmethod
    def of(cls, array: np.ndarray) -> "ArraySpec":
        """Returns the specification of an array that is there."""
        return cls(array.shape, array.dtype.name)

    @classmethod
    def parse(cls, shape: object, dtype: object) -> "ArraySpec":
        """Returns the specification that plain values describe.

        Raises:
            ValueError: they describe no array of numbers.
        """
        if not isinstance(dtype, str) or dtype not in DTYPES:
            raise ValueError(f"dtype {dtype!r} is not one of {', '.join(sorted(DTYPES))}")
        if not isinstance(shape, list) or len(shape) > _MAX_RANK:
            raise ValueError(f"shape {str(shape)[:80]} is not a list of up to {_MAX_RANK} sizes")
        if not all(type(size) is int and size >= 0 for size in shape):
            raise ValueError(f"shape {str(shape)[:80]} does not consist of sizes")
        return cls(tuple(shape), dtype)

    @property
    def size_bytes(self) -> int:
        """What its values take."""
        return math.prod(self.shape) * np.dtype(self.dtype).itemsize


def write_arrays(path: pathlib.Path, arrays: Sequence[np.ndarray]) -> None:
    """Writes arrays as members 00000.npy, 00001.npy, … of one file.

    Positions are safe as names of members, whatever a layer is called. No second copy is made.
    """
    with zipfile.ZipFile(path, "x", zipfile.ZIP_STORED) as archive:
        for position, array in enumerate(arrays):
            if position == len(arrays) // 2:
                fault_point("checkpoint.mid_file")
            with archive.open(_member(position), "w", force_zip64=True) as member:
                in_order = np.asarray(array, order="C")
                np.lib.format.write_array(member, in_order, allow_pickle=False)


def read_arrays(path: pathlib.Path, specs: Sequence[ArraySpec]) -> list[np.ndarray]:
    """Reads the arrays of a file that `write_arrays` wrote.

    Args:
        path: the file.
        specs: what each array has to be; nothing is allocated for one that is anything else.

    Raises:
        OSError: it is not there or cannot be read.
        ValueError, zipfile.BadZipFile: it holds anything else.
    """
    with open_regular(path) as file:
        size_bytes = file.seek(0, 2)
        needed = sum(spec.size_bytes for spec in specs)
        if needed > size_bytes:
            raise ValueError(
                f"arrays of {needed:,} bytes cannot be in {path.name} of {size_bytes:,} bytes"
            )
        with zipfile.ZipFile(file) as archive:
            members = archive.infolist()
            for position, member in enumerate(members):
                if member.filename != _member(position):
                    raise ValueError(
                        f"member {member.filename[:80]!r} where {_member(position)} is required"
                    )
            if len(members) != len(specs):
                raise ValueError(f"{len(members)} arrays where {len(specs)} are required")
            return [
                _read_array(archive, member, spec)
                for member, spec in zip(members, specs, strict=True)
            ]


def _read_array(archive: zipfile.ZipFile, member: zipfile.ZipInfo, spec: ArraySpec) -> np.ndarray:
    if (
        member.compress_type != zipfile.ZIP_STORED
        or member.file_size > spec.size_bytes + _MAX_HEADER_BYTES
    ):
        raise ValueError(f"{member.filename} is not an array of {spec.size_bytes:,} bytes, stored")
    with archive.open(member) as file:
        version = np.lib.format.read_magic(file)
        if version != (1, 0):
            raise ValueError(f"{member.filename} has format version {version}")
        shape, in_fortran_order, dtype = np.lib.format.read_array_header_1_0(file)
        # An object's dtype has no name among ours, so nothing pickled gets past this.
        if (shape, dtype.name) != spec or dtype.byteorder == ">" or in_fortran_order:
            raise ValueError(
                f"{member.filename} holds {dtype.name}{list(shape)} where"
                f" {spec.dtype}{list(spec.shape)} is required"
            )
        content = file.read(spec.size_bytes)
        if len(content) != spec.size_bytes or file.read(1):
            raise ValueError(f"{member.filename} does not end where it has to")
    return np.frombuffer(content, dtype).reshape(shape)


def _member(position: int) -> str:
    return f"{position:05d}.npy"
