"""Loads Fashion-MNIST for the programs of the benchmark, with only NumPy."""

import dataclasses
import gzip
import pathlib
import sys
import zlib

import numpy as np

_DATA_EXIT_CODE = 3
_PREFIXES = ("train", "t10k")


@dataclasses.dataclass(frozen=True)
class FashionMnist:
    """The data of the four files.

    Attributes:
        train_images: uint8 `(60000, 28, 28, 1)`; all arrays are read-only.
        train_labels: uint8 `(60000,)`, 0 to 9.
        test_images: uint8 `(10000, 28, 28, 1)`.
        test_labels: uint8 `(10000,)`.
    """

    train_images: np.ndarray
    train_labels: np.ndarray
    test_images: np.ndarray
    test_labels: np.ndarray


def load_fashion_mnist(data_dir: pathlib.Path) -> FashionMnist:
    """Loads the four original files, compressed or not; exits on an error."""
    try:
        arrays = []
        for prefix in _PREFIXES:
            images = _read_idx(data_dir, f"{prefix}-images-idx3-ubyte", num_axes=3)
            labels = _read_idx(data_dir, f"{prefix}-labels-idx1-ubyte", num_axes=1)
            if not 0 < len(images) == len(labels) or images.shape[1:] != (28, 28):
                raise ValueError(f"{prefix}: {images.shape} images with {len(labels)} labels")
            if labels.max() > 9:
                raise ValueError(f"{prefix}: a label of {labels.max()}")
            arrays += [images[..., np.newaxis], labels]
    except (OSError, EOFError, ValueError, zlib.error) as error:
        print(
            f"error: --data_dir={data_dir}: {error} — the four original files of Fashion-MNIST,"
            " .gz or unpacked, are required; put them there",
            file=sys.stderr,
        )
        raise SystemExit(_DATA_EXIT_CODE) from None
    return FashionMnist(*arrays)


def _read_idx(folder: pathlib.Path, name: str, *, num_axes: int) -> np.ndarray:
    """Reads a file of unsigned bytes: magic number, size of each axis, values."""
    packed, plain = folder / f"{name}.gz", folder / name
    content = gzip.decompress(packed.read_bytes()) if packed.exists() else plain.read_bytes()
    mark, *shape = np.frombuffer(content, ">u4", 1 + num_axes).tolist()
    if mark != 0x800 + num_axes:
        raise ValueError(f"{name} starts with {mark:#x}, not with {0x800 + num_axes:#x}")
    return np.frombuffer(content, np.uint8, offset=4 * (1 + num_axes)).reshape(shape)
