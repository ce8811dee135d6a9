"""Loads a user's images from PNG files and NumPy arrays."""

import pathlib
from collections.abc import Sequence

import numpy as np

from app.data.dataset import IMAGE_SHAPE
from app.runtime.errors import DataError, reason_of


def load_image_files(paths: Sequence[str]) -> tuple[list[str], np.ndarray]:
    """Loads images in the format of the networks.

    Args:
        paths: `.png` files of 28 × 28 pixels, grey or colour; `.npy` files with uint8 arrays
            `(28, 28)`, `(N, 28, 28)` or either with a last axis of 1.

    Returns:
        A name for each image, and uint8 `(N, 28, 28, 1)`, in the order of the files.

    Raises:
        DataError: a file is missing, unreadable or of another size.
    """
    names, images = [], []
    for path in map(pathlib.Path, paths):
        if path.suffix.lower() not in (".png", ".npy"):
            raise DataError(f"{path} is neither a .png nor a .npy file; convert it")
        try:
            pixels = _load_npy(path) if path.suffix.lower() == ".npy" else _load_png(path)
        except FileNotFoundError:
            raise DataError(f"{path} does not exist") from None
        except Exception as error:  # A damaged file may raise any exception.
            raise DataError(
                f"{path}: not a readable {path.suffix} image ({reason_of(error)}); check the path"
                " and the file"
            ) from error
        if pixels.ndim > 2 and pixels.shape[-1] == 1:
            pixels = pixels[..., 0]
        is_image = pixels.ndim in (2, 3) and pixels.shape[-2:] == IMAGE_SHAPE[:2]
        if pixels.dtype != np.uint8 or pixels.size == 0 or not is_image:
            raise DataError(
                f"{path} must hold uint8 images of 28 x 28, light garments on black, got"
                f" {pixels.dtype} {' x '.join(map(str, pixels.shape))}; resize or convert it"
            )
        pixels = pixels.reshape(-1, *IMAGE_SHAPE)
        images.append(pixels)
        names += [str(path)] if len(pixels) == 1 else [f"{path}[{i}]" for i in range(len(pixels))]
    return names, np.concatenate(images)


def _load_npy(path: pathlib.Path) -> np.ndarray:
    # Memory-mapped: the header of a damaged file may declare a huge array.
    array = np.load(path, mmap_mode="r", allow_pickle=False)
    if not isinstance(array, np.ndarray):
        raise ValueError("not a single array")
    return array


def _load_png(path: pathlib.Path) -> np.ndarray:
    from PIL import Image  # Comes with Matplotlib.

    if path.exists() and not path.is_file():  # Opening a pipe would wait.
        raise ValueError("not a file")
    with Image.open(path, formats=["png"]) as image:
        if image.mode.startswith("I"):
            raise ValueError("more than 8 bits per channel")
        return np.asarray(image.convert("L"))  # Luma of ITU-R BT.601; ignores transparency.
