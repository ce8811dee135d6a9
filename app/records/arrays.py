"""Reads and writes named arrays in one `.safetensors` file, which holds numbers and no code.

The library checks dtypes, shapes and offsets of the header against the size of the file. This
module also checks that the file is regular, that NumPy has the dtypes, and that the names are
complete.
"""

import contextlib
import io
import json
import os
import pathlib
import re
import zlib
from collections.abc import Iterator, Mapping

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

# Dtypes of variables: safetensors' name → NumPy's name. NumPy has no bfloat16.
DTYPES = {
    **{"BOOL": "bool", "F16": "float16", "F32": "float32", "F64": "float64"},
    **{"I8": "int8", "I16": "int16", "I32": "int32", "I64": "int64"},
    **{"U8": "uint8", "U16": "uint16", "U32": "uint32", "U64": "uint64"},
}
_ORDER = "order"  # The library sorts by dtype and name; the metadata keep the order.
_CHECK_VALUES = "crc32"  # Of each array's bytes, in the metadata.


def write_arrays(path: pathlib.Path, arrays: Mapping[str, np.ndarray]) -> None:
    """Writes a new file; copies in memory only arrays that are not in C order.

    Raises:
        OSError: the file exists already, or cannot be written.
        ValueError: an array's dtype is not one of `DTYPES`.
    """
    for name, array in arrays.items():
        if array.dtype.name not in DTYPES.values():
            raise ValueError(f"{name} has dtype {array.dtype.name}, which cannot be saved")
    path.touch(exist_ok=False)
    mode = path.stat().st_mode  # The library makes the file readable only by its owner.
    # The library writes the buffer as it is in memory, ignoring strides.
    in_order = {
        name: np.asarray(array, array.dtype.newbyteorder("<"), order="C")
        for name, array in arrays.items()
    }
    check_values = {name: zlib.crc32(array.data) for name, array in in_order.items()}
    metadata = {_ORDER: json.dumps(list(arrays)), _CHECK_VALUES: json.dumps(check_values)}
    with _os_errors():
        save_file(in_order, path, metadata=metadata)
    path.chmod(mode)


class ArrayFile:
    """The arrays of one open file.

    Attributes:
        names: of all arrays, in the order of writing.
    """

    def __init__(self, opened: safe_open) -> None:
        self._opened = opened
        metadata = opened.metadata() or {}  # None if another program wrote the file.
        self.names = _array_names(opened, metadata.get(_ORDER))
        self._check_values = json.loads(metadata.get(_CHECK_VALUES, "null"))
        if self._check_values is not None and not isinstance(self._check_values, dict):
            raise ValueError(f"{_CHECK_VALUES} in its metadata is not an object")

    def read(self, name: str) -> np.ndarray:
        """Reads one array.

        Raises:
            OSError: the file cannot be read.
            SafetensorError: there is no such array.
            ValueError: the array has changed since it was written.
        """
        with _os_errors():
            array = self._opened.get_tensor(name)
        if self._check_values is None:
            return array
        if self._check_values.get(name) != zlib.crc32(array.data):
            raise ValueError(f"{name:.80} does not match its check value")
        return array


def _array_names(opened: safe_open, order: str | None) -> list[str]:
    names = opened.keys()
    for name in names:
        dtype = opened.get_slice(name).get_dtype()
        if dtype not in DTYPES:
            raise ValueError(f"{name:.80} has dtype {dtype}")
    found = sorted(names) if order is None else [str(name) for name in json.loads(order)]
    if sorted(found) != sorted(names):
        raise ValueError("the order in its metadata does not name each of its arrays once")
    return found


@contextlib.contextmanager
def open_arrays(file: io.BufferedReader) -> Iterator[ArrayFile]:
    """Opens a file of arrays, to read single arrays.

    Args:
        file: the result of `open_regular`.

    Raises:
        OSError: the file cannot be read.
        SafetensorError: the file is not a safetensors file.
        ValueError: its metadata do not name each array once, or a dtype is not one of `DTYPES`.
    """
    # By descriptor, because the path may have been replaced. Not memory-mapped: if another process
    # truncates a mapped file, reading it ends this process.
    path = f"/dev/fd/{file.fileno()}"
    with _os_errors(), safe_open(path, "numpy", backend="pread") as opened:
        yield ArrayFile(opened)


def read_arrays(file: io.BufferedReader) -> dict[str, np.ndarray]:
    """Reads all arrays of a file, in the order of writing.

    Raises:
        OSError, SafetensorError, ValueError: see `open_arrays` and `ArrayFile.read`.
    """
    with open_arrays(file) as arrays:
        return {name: arrays.read(name) for name in arrays.names}


@contextlib.contextmanager
def _os_errors() -> Iterator[None]:
    """Raises system errors as `OSError`; the library has the error number only in its message."""
    try:
        yield
    except (SafetensorError, OSError) as error:
        number = re.search(r"\(os error (\d+)\)", str(error))
        if number is None:
            raise
        raise OSError(int(number[1]), os.strerror(int(number[1]))) from error
