"""Reads and writes named arrays in one `.safetensors` file, which holds numbers and no code.

The library checks dtypes, shapes and offsets of the header against the size of the file. This
module also checks that the file is regular, that NumPy has the dtypes, and that the names are
complete.
"""

import contextlib
import functools
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


@contextlib.contextmanager
def open_arrays(file: io.BufferedReader) -> Iterator[safe_open]:
    """Opens a file of arrays, to read single arrays with `get_tensor(name)`.

    Args:
        file: the result of `open_regular`.

    Raises:
        OSError: the file cannot be read.
        SafetensorError: the file is not a safetensors file, or lacks a requested array.
    """
    # By descriptor, because the path may have been replaced. Not memory-mapped: if another process
    # truncates a mapped file, reading it ends this process.
    path = f"/dev/fd/{file.fileno()}"
    with _os_errors(), safe_open(path, "numpy", backend="pread") as arrays:
        yield arrays


def array_names(arrays: safe_open) -> list[str]:
    """Returns the names of all arrays, in the order of writing.

    Raises:
        ValueError: the order does not name each array once, or a dtype is not one of `DTYPES`.
    """
    names = arrays.keys()
    for name in names:
        dtype = arrays.get_slice(name).get_dtype()
        if dtype not in DTYPES:
            raise ValueError(f"{name:.80} has dtype {dtype}")
    text = (arrays.metadata() or {}).get(_ORDER)  # None if another program wrote the file.
    order = sorted(names) if text is None else [str(name) for name in json.loads(text)]
    if sorted(order) != sorted(names):
        raise ValueError("the order in its metadata does not name each of its arrays once")
    return order


def read_array(arrays: safe_open, name: str) -> np.ndarray:
    """Reads one array.

    Raises:
        SafetensorError: there is no such array.
        ValueError: the array has changed since it was written.
    """
    array = arrays.get_tensor(name)
    text = (arrays.metadata() or {}).get(_CHECK_VALUES)
    if text is not None and _check_values(text).get(name) != zlib.crc32(array.data):
        raise ValueError(f"{name:.80} does not match its check value")
    return array


@functools.lru_cache(maxsize=8)
def _check_values(text: str) -> dict[str, int]:
    """Parses the check values of a file, which are needed for each of its arrays."""
    values = json.loads(text)
    if not isinstance(values, dict):
        raise ValueError(f"{_CHECK_VALUES} in its metadata is not an object")
    return values


def read_arrays(file: io.BufferedReader) -> dict[str, np.ndarray]:
    """Reads all arrays of a file, in the order of writing.

    Raises:
        OSError, SafetensorError, ValueError: see `open_arrays` and `array_names`.
    """
    with open_arrays(file) as arrays:
        return {name: read_array(arrays, name) for name in array_names(arrays)}


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
