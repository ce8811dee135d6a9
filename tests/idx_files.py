"""Writes files in the format of Fashion-MNIST."""

import pathlib
import struct

import numpy as np

from app.data.data_sources import SHA256
from app.data.synthetic import generate_synthetic


def idx_bytes(array: np.ndarray) -> bytes:
    """Returns `array` as an IDX file: uint8 of any number of axes."""
    return struct.pack(f">I{array.ndim}I", 0x800 | array.ndim, *array.shape) + array.tobytes()


def write_idx(path: pathlib.Path, array: np.ndarray) -> None:
    """Writes `array` as an IDX file."""
    path.write_bytes(idx_bytes(array))


def write_data(folder: pathlib.Path) -> None:
    """Writes the four files of Fashion-MNIST with 500 and 200 generated images."""
    folder.mkdir()
    dataset = generate_synthetic(num_train=500, num_test=200)
    arrays = dataset.train_images, dataset.train_labels, dataset.test_images, dataset.test_labels
    for name, array in zip(SHA256, arrays, strict=True):
        (folder / name).write_bytes(idx_bytes(array[..., 0] if array.ndim == 4 else array))
