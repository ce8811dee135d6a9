"""Named arrays in one `.safetensors` file: numbers only, never code.

The library checks the header's length, dtypes, shapes and offsets against the file's size before it
reads an array. What it does not check is checked here: that the file is a regular one, that NumPy
has the dtypes, and that the order of the names is complete.
"""

import contextlib
import io
import json
import os
import pathlib
import re
from collections.abc import Iterator, Mapping

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

# What variables of models and optimizers can be, safetensors' names for NumPy's. No bfloat16, which
# NumPy does not have.
DTYPES = {
    **{"BOOL": "bool", "F16": "float16", "F32": "float32", "F64": "float64"},
    **{"I8": "int8", "I16": "int16", "I32": "int32", "I64": "int64"},
    **{"U8": "uint8", "U16": "uint16", "U32": "uint32", "U64": "uint64"},
}
_ORDER = "order"  # The library sorts by dtype and name, so the file's metadata hold the order.


def write_arrays(path: pathlib.Path, arrays: Mapping[str, np.ndarray]) -> None:
    """Writes a new file; only arrays that are not in C order are copied in memory.

    Raises:
        OSError: it is there already, or cannot be written.
        ValueError: an array's dtype is not one of `DTYPES`.
    """
    for name, array in arrays.items():
        if array.dtype.name not in DTYPES.values():
            raise ValueError(f"{name} has dtype {array.dtype.name}, which cannot be saved")
    path.touch(exist_ok=False)
    mode = path.stat().st_mode  # The library's file could be read by its owner alone.
    # The library writes the buffer as it lies in memory, whatever the strides.
    in_order = {name: np.asarray(array, order="C") for name, array in arrays.items()}
    with _os_errors():
        save_file(in_order, path, metadata={_ORDER: json.dumps(list(arrays))})
    path.chmod(mode)


@contextlib.contextmanager
def open_arrays(file: io.BufferedReader) -> Iterator[safe_open]:
    """Opens a file of arrays, to read them one at a time with `get_tensor(name)`.

    Args:
        file: what `open_regular` returned.

    Raises:
        OSError: it cannot be read.
        SafetensorError: it is no such file, or does not hold an array that is asked for.
    """
    # By descriptor: whatever has the path's name by now. Not mapped into memory, where reading a
    # file that somebody truncates would end the process.
    path = f"/dev/fd/{file.fileno()}"
    with _os_errors(), safe_open(path, "numpy", backend="pread") as arrays:
        yield arrays


def array_names(arrays: safe_open) -> list[str]:
    """Returns the names of all arrays, in the order in which they were written.

    Raises:
        ValueError: the order does not name each of them once, or a dtype is not one of `DTYPES`.
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


def read_arrays(file: io.BufferedReader) -> dict[str, np.ndarray]:
    """Reads all arrays of a file, in the order in which they were written.

    Raises:
        OSError, SafetensorError, ValueError: see `open_arrays` and `array_names`.
    """
    with open_arrays(file) as arrays:
        return {name: arrays.get_tensor(name) for name in array_names(arrays)}


@contextlib.contextmanager
def _os_errors() -> Iterator[None]:
    """Raises an error of the system as an `OSError`: the library has its number in a text only."""
    try:
        yield
    except (SafetensorError, OSError) as error:
        number = re.search(r"\(os error (\d+)\)", str(error))
        if number is None:
            raise
        raise OSError(int(number[1]), os.strerror(int(number[1]))) from error
