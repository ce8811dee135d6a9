"""Writes files in the format of Fashion-MNIST."""

import pathlib
import struct

import numpy as np


def idx_bytes(array: np.ndarray) -> bytes:
    """Returns `array` as an IDX file: uint8 of any number of axes."""
    return struct.pack(f">I{array.ndim}I", 0x800 | array.ndim, *array.shape) + array.tobytes()


def write_idx(path: pathlib.Path, array: np.ndarray) -> None:
    """Writes `array` as an IDX file."""
    path.write_bytes(idx_bytes(array))
