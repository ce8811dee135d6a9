"""Loads a user's images from PNG files and NumPy arrays."""

import pathlib
from collections.abc import Sequence

import numpy as np

from app.data.dataset import IMAGE_SHAPE
from app.runtime.errors import DataError, reason_of

# Luma of gamma-encoded R'G'B', as PNG files hold it; reference: ITU-R BT.601. The result is rounded
# to the nearest level. Pillow's `convert("L")` uses the same weights in 16-bit fixed point; results
# differ by one level if the sum lies halfway between two levels.
_LUMA = np.array([0.299, 0.587, 0.114])


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
            if path.exists() and not path.is_file():
                raise ValueError("not a file")
            pixels = _load_npy(path) if path.suffix.lower() == ".npy" else _load_png(path)
        except Exception as error:  # A damaged file may raise any exception.
            raise DataError(
                f"{path}: not a readable {path.suffix} image ({reason_of(error)}); check the path"
                " and the file"
            ) from error
        if pixels.dtype != np.uint8 or pixels.size == 0 or not _is_image_shape(pixels.shape):
            raise DataError(
                f"{path} must hold uint8 images of 28 x 28, light garments on black, got"
                f" {pixels.dtype} {' x '.join(map(str, pixels.shape))}; resize or convert it"
            )
        pixels = pixels.reshape(-1, *IMAGE_SHAPE)
        images.append(pixels)
        names += [str(path)] if len(pixels) == 1 else [f"{path}[{i}]" for i in range(len(pixels))]
    return names, np.concatenate(images)


def _is_image_shape(shape: tuple[int, ...]) -> bool:
    if len(shape) > 2 and shape[-1] == 1:
        shape = shape[:-1]
    return len(shape) in (2, 3) and shape[-2:] == IMAGE_SHAPE[:2]


def _load_npy(path: pathlib.Path) -> np.ndarray:
    # Memory-mapped: the header of a damaged file may declare a huge array.
    array = np.load(path, mmap_mode="r", allow_pickle=False)
    if not isinstance(array, np.ndarray):
        raise ValueError("not a single array")
    return array


def _load_png(path: pathlib.Path) -> np.ndarray:
    from matplotlib import image

    pixels = image.imread(path, format="png")  # Floats in [0, 1], (h, w) or (h, w, 3 or 4).
    if pixels.ndim == 3:
        pixels = pixels[..., :3] @ _LUMA  # Transparency is ignored.
    return np.round(pixels * 255).astype(np.uint8)
