"""Finds, verifies and loads Fashion-MNIST.

Searches the given folder, `$FASHION_MNIST_DIR`, a prepared TensorFlow Datasets (TFDS) directory,
and last the network. From every source the arrays equal the four original files, in their order,
which their SHA-256 verifies.
"""

import gzip
import hashlib
import math
import os
import pathlib
import struct
import zlib
from collections.abc import Mapping

import numpy as np

from app.data.data_sources import (
    DOWNLOAD_URL,
    FILES,
    HOW_TO_GET,
    SHA256,
    TO_DOWNLOAD,
    DataMissingError,
    DataSource,
    check_connection,
    find_data_source,
)
from app.data.dataset import IMAGE_SHAPE, ImageDataset
from app.runtime.errors import DataError, reason_of

_MAX_FILE_BYTES = 64 << 20


def load_fashion_mnist(
    data_dir: str | None,
    *,
    allow_unverified: bool = False,
    environ: Mapping[str, str] = os.environ,
) -> ImageDataset:
    """Finds, verifies and loads Fashion-MNIST.

    Args:
        data_dir: a folder with the four files, compressed or not, or a TFDS data directory; if
            given, no other place is searched.
        allow_unverified: accept other content in the right format.
        environ: environment variables.

    Raises:
        DataMissingError: the dataset was not found and cannot be downloaded.
        DataError: the dataset that was found is damaged, or is not Fashion-MNIST.
    """
    source = find_data_source(data_dir, environ)
    if source.kind == FILES:
        return _load_files(source.paths, allow_unverified)
    if source.kind == TO_DOWNLOAD:
        _download(source)
    return _load_prepared(source.folder, allow_unverified)


def _load_files(paths: Mapping[str, pathlib.Path], allow_unverified: bool) -> ImageDataset:
    contents = {name: _read(path) for name, path in paths.items()}
    return _parse(contents, paths, allow_unverified)


def _read(path: pathlib.Path) -> bytes:
    """Returns the decompressed content, at most one byte more than the largest valid file."""
    opener = gzip.open if path.suffix == ".gz" else open
    try:
        with opener(path, "rb") as file:
            return file.read(_MAX_FILE_BYTES + 1)
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        with open(path, "rb") as file:
            start = file.read(16)
        what = "a web page" if start.lstrip().startswith(b"<") else f"it starts with {start[:4]!r}"
        raise DataError(
            f"{path}: not an intact gzip file ({error}, {what}); download it again"
        ) from error
    except OSError as error:
        raise DataError(
            f"{path}: cannot be read ({error.strerror}); check its permissions"
        ) from error


def _parse_idx(content: bytes, path: object, *, is_images: bool) -> np.ndarray:
    """Checks header, size and label range; returns uint8 `(N, 28, 28, 1)` or `(N,)`.

    Reference: the IDX format, at the end of Y. LeCun's page on MNIST.
    """
    image_shape = IMAGE_SHAPE[:2] if is_images else ()
    header_bytes = 8 + 4 * len(image_shape)
    array = np.frombuffer(content[header_bytes:], np.uint8)
    count, rest = divmod(array.size, math.prod(image_shape))
    if rest or not count or content[:header_bytes] != _idx_header((count, *image_shape)):
        kind = "images of 28 x 28" if is_images else "labels"
        expected = f"{_idx_header((0, *image_shape))[:4].hex()}, their number N"
        expected += ", 28, 28 and 784 N bytes" if is_images else " and N bytes"
        start = content[:header_bytes].hex(" ", 4) or "nothing"
        raise DataError(
            f"{path}: {len(content):,} bytes that begin with {start}; a file of {kind} has"
            f" {expected}; download it again"
        )
    if is_images:
        return array.reshape(-1, *IMAGE_SHAPE)
    if array.max() > 9:
        index = int(np.argmax(array > 9))
        raise DataError(
            f"{path}: label {array[index]} at index {index} is not between 0 and 9; download it"
            " again"
        )
    return array


def _parse(
    contents: Mapping[str, bytes], sources: Mapping[str, object], allow_unverified: bool
) -> ImageDataset:
    """Combines the contents of the four files to a dataset; checks format, counts and SHA-256."""
    names = list(SHA256)
    arrays = {n: _parse_idx(contents[n], sources[n], is_images="images" in n) for n in names}
    for images, labels in (names[:2], names[2:]):
        if len(arrays[images]) != len(arrays[labels]):
            raise DataError(
                f"{sources[images]} has {len(arrays[images])} images, but {sources[labels]} has"
                f" {len(arrays[labels])} labels; download both again"
            )
    hashes = {name: hashlib.sha256(contents[name]).hexdigest() for name in names}
    others = [name for name in names if hashes[name] != SHA256[name]]
    if others and not allow_unverified:
        name = others[0]
        raise DataError(
            f"{sources[name]}: SHA-256 is {hashes[name][:12]}…, that of Fashion-MNIST is"
            f" {SHA256[name][:12]}…; download it again, or accept it with --allow_unverified_data"
        )
    title = "unverified" if others else "fashion_mnist"
    return ImageDataset(title, *(arrays[name] for name in names))


def _load_prepared(tfds_dir: pathlib.Path, allow_unverified: bool) -> ImageDataset:
    """Loads the dataset prepared by TFDS and restores the order of the original files.

    TFDS orders examples by a hash of their index, salted with the name of the split. The same hash
    gives the inverse order, and the SHA-256 of the rebuilt files verifies order and content.
    """
    import tensorflow_datasets as tfds
    from tensorflow_datasets.core.hashing import Hasher

    contents = {}
    for split, prefix in (("train", "train"), ("test", "t10k")):
        try:
            builder = tfds.builder("fashion_mnist", data_dir=tfds_dir)
            examples = tfds.as_numpy(builder.as_dataset(split=split, batch_size=-1))
        except Exception as error:  # Damaged records raise various exceptions.
            raise DataError(
                f"{tfds_dir}/fashion_mnist: cannot be read ({reason_of(error)}); delete it, so that"
                " TFDS prepares it again"
            ) from error
        written_order = sorted(range(len(examples["label"])), key=Hasher(split).hash_key)
        images = examples["image"][np.argsort(written_order), ..., 0]
        labels = examples["label"][np.argsort(written_order)].astype(np.uint8)
        contents[f"{prefix}-images-idx3-ubyte"] = idx_bytes(images)
        contents[f"{prefix}-labels-idx1-ubyte"] = idx_bytes(labels)
    return _parse(contents, dict.fromkeys(contents, tfds_dir), allow_unverified)


def idx_bytes(array: np.ndarray) -> bytes:
    """Returns a uint8 array of any number of axes as an IDX file."""
    return _idx_header(array.shape) + array.tobytes()


def _idx_header(shape: tuple[int, ...]) -> bytes:
    """Returns a mark of bytes with so many axes, and their lengths."""
    return struct.pack(f">{1 + len(shape)}I", 0x800 | len(shape), *shape)


def _download(source: DataSource) -> None:
    """Downloads and prepares the dataset with TFDS."""
    try:
        check_connection(DOWNLOAD_URL)
    except OSError as error:
        raise DataMissingError(
            f"Fashion-MNIST is in none of {', '.join(source.looked)} and cannot be downloaded"
            f" ({reason_of(error)}); {HOW_TO_GET}"
        ) from error
    import tensorflow_datasets as tfds

    try:
        tfds.builder("fashion_mnist", data_dir=source.folder).download_and_prepare()
    except Exception as error:  # Various exceptions: checksum, disk, broken connection.
        raise DataError(
            f"{source.folder}: cannot be prepared from {DOWNLOAD_URL} ({reason_of(error)}); check"
            f" the network and the free disk space, or {HOW_TO_GET}"
        ) from error
