"""Fashion-MNIST: found, verified to the last bit, loaded.

Looked for in the folder that was named, in `$FASHION_MNIST_DIR`, in a prepared TensorFlow Datasets
directory, and last on the network. Whatever the way, the arrays are those of the four original
files in their order: their SHA-256 is the proof.
"""

import gzip
import hashlib
import os
import pathlib
import struct
import threading
import zlib
from collections.abc import Mapping

import numpy as np

from app.data.dataset import IMAGE_SHAPE, ImageDataset
from app.errors import DataError, reason_of

# Name of each original file → SHA-256 of its decompressed bytes.
# Reference: H. Xiao et al., "Fashion-MNIST: a Novel Image Dataset", 2017.
SHA256 = {
    "train-images-idx3-ubyte": "c59f468a2f672dc815687fe0f83887768d799fd8a3f3276145d20f83aa44d888",
    "train-labels-idx1-ubyte": "bad3541b69d912435c50bb6ba87bec294ff4f6a2e1246121d8633921760443d9",
    "t10k-images-idx3-ubyte": "5b4141f0afbad91edebe8549f8fcffe087ea10ca49f1dbef5c9a5cd8815ce37b",
    "t10k-labels-idx1-ubyte": "0402a96d92fd2663957122ceb108a494c5af83dab82d92729df917d7dec38c34",
}
_IMAGES_MAGIC, _LABELS_MAGIC = 0x803, 0x801
_MAX_FILE_BYTES = 64 << 20
_MAX_EXAMPLES = 60_000
_CONNECT_TIMEOUT_SEC = 8
HOW_TO_GET = (
    "put train-images-idx3-ubyte.gz, train-labels-idx1-ubyte.gz, t10k-images-idx3-ubyte.gz and"
    " t10k-labels-idx1-ubyte.gz into a folder and give it as --data_dir"
)


class DataMissingError(DataError):
    """Real Fashion-MNIST is nowhere to be had; damaged data is another matter."""


def load_fashion_mnist(
    data_dir: str | None,
    *,
    allow_unverified: bool = False,
    environ: Mapping[str, str] = os.environ,
) -> ImageDataset:
    """Finds, verifies and loads Fashion-MNIST.

    Args:
        data_dir: a folder with the four files, compressed or not, or a TFDS data directory. Where
            it is given, nowhere else is looked.
        allow_unverified: accept other content, as long as the format is right.
        environ: environment variables.

    Raises:
        DataMissingError: it is in none of the places, and cannot be downloaded.
        DataError: what was found is damaged, or is not Fashion-MNIST.
    """
    if data_dir:
        return _load_from(_folder(data_dir), "--data_dir", allow_unverified)
    looked = []
    if environ.get("FASHION_MNIST_DIR"):
        folder = _folder(environ["FASHION_MNIST_DIR"])
        try:
            return _load_from(folder, "FASHION_MNIST_DIR", allow_unverified)
        except DataMissingError:
            looked.append(f"FASHION_MNIST_DIR={folder}")
    tfds_dir = _folder(environ.get("TFDS_DATA_DIR") or "~/tensorflow_datasets")
    if not _is_prepared(tfds_dir):
        _download(tfds_dir, looked)
    return _load_prepared(tfds_dir, allow_unverified)


def _load_from(folder: pathlib.Path, named_by: str, allow_unverified: bool) -> ImageDataset:
    """Loads from a folder that the user named: the original files, or what TFDS prepared."""
    paths = {name: _find_file(folder, name) for name in SHA256}
    missing = [name for name, path in paths.items() if path is None]
    if not missing:
        return _load_idx(paths, allow_unverified)
    if _is_prepared(folder):
        return _load_prepared(folder, allow_unverified)
    what = "no such folder" if not folder.is_dir() else f"{', '.join(missing)} missing there"
    raise DataMissingError(
        f"{named_by}={folder}: {what} — the four Fashion-MNIST files (.gz or unpacked)"
        f" are required; {HOW_TO_GET}"
    )


def _folder(name: str) -> pathlib.Path:
    try:
        folder = pathlib.Path(name).expanduser()
        folder.is_dir()
        return folder
    except (OSError, RuntimeError, ValueError) as error:
        raise DataMissingError(
            f"{name}: not a folder ({error}) — a folder with the data is required; {HOW_TO_GET}"
        ) from error


def _find_file(folder: pathlib.Path, name: str) -> pathlib.Path | None:
    for path in (folder / f"{name}.gz", folder / name):
        if path.is_file():
            return path
    return None


def _load_idx(paths: Mapping[str, pathlib.Path], allow_unverified: bool) -> ImageDataset:
    """Loads the four original files, each checked for itself and images against labels."""
    arrays, hashes = {}, {}
    for name, path in paths.items():
        content = _read(path)
        arrays[name] = _parse_idx(content, path, is_images="images" in name)
        hashes[name] = hashlib.sha256(content).hexdigest()
    return _assemble(arrays, hashes, paths, allow_unverified)


def _read(path: pathlib.Path) -> bytes:
    """Returns the decompressed content, at most one byte more than any real file has."""
    opener = gzip.open if path.suffix == ".gz" else open
    try:
        with opener(path, "rb") as file:
            return file.read(_MAX_FILE_BYTES + 1)
    except gzip.BadGzipFile as error:
        with open(path, "rb") as file:
            start = file.read(16)
        what = "a web page" if start.lstrip().startswith(b"<") else f"it starts with {start[:4]!r}"
        raise DataError(
            f"{path}: not an intact gzip file ({error}; {what}) — the original file is required;"
            " get it again"
        ) from error
    except (EOFError, zlib.error) as error:
        raise DataError(
            f"{path}: cut short or damaged ({error}) — the original file is required; get it again"
        ) from error
    except OSError as error:
        raise DataError(
            f"{path}: cannot be read ({error.strerror}) — a readable file is required;"
            " check its permissions"
        ) from error


def _parse_idx(content: bytes, path: pathlib.Path, *, is_images: bool) -> np.ndarray:
    """Checks header, size and label range; returns uint8 `(N, 28, 28, 1)` or `(N,)`.

    Reference: the IDX format, at the end of Y. LeCun's page on MNIST.
    """
    magic = _IMAGES_MAGIC if is_images else _LABELS_MAGIC
    header_bytes = 16 if is_images else 8
    found = struct.unpack(">I", content[:4])[0] if len(content) >= header_bytes else None
    if found != magic:
        swapped = found in (_IMAGES_MAGIC, _LABELS_MAGIC)
        kind, other = ("images", "labels") if is_images else ("labels", "images")
        raise DataError(
            f"{path}: starts with {content[:4].hex() or 'nothing'}"
            + (f", which marks {other}" if swapped else "")
            + f" — {magic:08x}, the mark of {kind}, is required;"
            + (" the files are swapped, rename them" if swapped else " get it again")
        )
    shape = struct.unpack(f">{header_bytes // 4 - 1}I", content[4:header_bytes])
    if shape[1:] != ((28, 28) if is_images else ()) or not 0 < shape[0] <= _MAX_EXAMPLES:
        raise DataError(
            f"{path}: header says {' x '.join(map(str, shape))} — up to {_MAX_EXAMPLES} images of"
            " 28 x 28, or labels for them, are required; get it again"
        )
    expected_bytes = int(np.prod(shape))
    if len(content) - header_bytes != expected_bytes:
        raise DataError(
            f"{path}: {len(content) - header_bytes} bytes after the header — {expected_bytes}, as"
            " the header says, are required; get it again"
        )
    array = np.frombuffer(content, np.uint8, offset=header_bytes)
    if is_images:
        return array.reshape(-1, *IMAGE_SHAPE)
    if array.max() > 9:
        index = int(np.argmax(array > 9))
        raise DataError(
            f"{path}: label {array[index]} at index {index} — 0 to 9 is required; get it again"
        )
    return array


def _assemble(
    arrays: Mapping[str, np.ndarray],
    hashes: Mapping[str, str],
    sources: Mapping[str, object],
    allow_unverified: bool,
) -> ImageDataset:
    """Puts four arrays together: as many labels as images, and the originals' content.

    Another content is refused unless it is allowed.
    """
    names = list(SHA256)
    for images, labels in (names[:2], names[2:]):
        if len(arrays[images]) != len(arrays[labels]):
            raise DataError(
                f"{sources[images]}: {len(arrays[images])} images, but {sources[labels]}:"
                f" {len(arrays[labels])} labels — one label for each image is required;"
                " get both again"
            )
    others = [name for name in names if hashes[name] != SHA256[name]]
    if others and not allow_unverified:
        name = others[0]
        raise DataError(
            f"{sources[name]}: its content has SHA-256 {hashes[name][:12]}… — Fashion-MNIST has"
            f" {SHA256[name][:12]}…; get it again, or accept it with --allow_unverified_data"
        )
    name = "unverified" if others else "fashion_mnist"
    return ImageDataset(name, *(arrays[name] for name in names))


def _is_prepared(tfds_dir: pathlib.Path) -> bool:
    """Tells, without importing TFDS, whether it has prepared Fashion-MNIST there."""
    return any(tfds_dir.glob("fashion_mnist/*/dataset_info.json"))


def _load_prepared(tfds_dir: pathlib.Path, allow_unverified: bool) -> ImageDataset:
    """Loads what TFDS prepared and puts it back into the order of the original files.

    TFDS writes examples in the order of a hash of their index, salted with the name of the split;
    the same hash gives the way back, and the SHA-256 of the files, rebuilt byte for byte, proves
    that both order and content are right.
    """
    import tensorflow_datasets as tfds
    from tensorflow_datasets.core.hashing import Hasher

    arrays, hashes = {}, {}
    for split, prefix in (("train", "train"), ("test", "t10k")):
        try:
            builder = tfds.builder("fashion_mnist", data_dir=tfds_dir)
            examples = tfds.as_numpy(builder.as_dataset(split=split, batch_size=-1))
        except Exception as error:  # TFDS and TensorFlow raise many kinds for damaged records.
            raise DataError(
                f"{tfds_dir}/fashion_mnist: cannot be read ({reason_of(error)}) — a directory"
                " that TFDS prepared is required; remove it and let it be prepared again"
            ) from error
        hasher = Hasher(split)
        written_order = sorted(range(len(examples["label"])), key=hasher.hash_key)
        images = np.empty_like(examples["image"])
        images[written_order] = examples["image"]
        labels = np.empty(len(images), np.uint8)
        labels[written_order] = examples["label"]
        for kind, magic, array in (
            ("images-idx3-ubyte", _IMAGES_MAGIC, images),
            ("labels-idx1-ubyte", _LABELS_MAGIC, labels),
        ):
            shape = array.shape[:3]
            content = struct.pack(f">I{len(shape)}I", magic, *shape) + array.tobytes()
            name = f"{prefix}-{kind}"
            hashes[name] = hashlib.sha256(content).hexdigest()
            arrays[name] = array
    return _assemble(arrays, hashes, dict.fromkeys(arrays, tfds_dir), allow_unverified)


def _download(tfds_dir: pathlib.Path, looked: list[str]) -> None:
    """Lets TFDS download and prepare the set in `tfds_dir`.

    Files that lie in `downloads/manual` below it are taken from there, checksums verified, without
    any network.
    """
    manual_dir = tfds_dir / "downloads" / "manual"
    has_files = all((manual_dir / f"{name}.gz").is_file() for name in SHA256)
    looked = [*looked, f"{tfds_dir}/fashion_mnist", str(manual_dir)]
    import tensorflow_datasets as tfds

    builder = tfds.builder("fashion_mnist", data_dir=tfds_dir)
    if not has_files:
        try:
            _check_connection(builder.URL)
        except OSError as error:
            raise DataMissingError(
                f"Fashion-MNIST is in none of {', '.join(looked)} and cannot be downloaded"
                f" ({reason_of(error)}) — the data is required; {HOW_TO_GET}"
            ) from error
    try:
        builder.download_and_prepare(
            download_config=tfds.download.DownloadConfig(manual_dir=manual_dir)
        )
    except Exception as error:  # A checksum, the disk, a connection that broke: many kinds.
        source = manual_dir if has_files else builder.URL
        raise DataError(
            f"{tfds_dir}: cannot be prepared from {source} ({reason_of(error)}) — the original"
            f" files and a disk with room are required; mend that, or {HOW_TO_GET}"
        ) from error


def _check_connection(url: str) -> None:
    """Raises `OSError` within 10 s unless the server answers; TFDS itself would try for minutes.

    In a thread of its own, because the look-up of a name takes no time limit.
    """
    import urllib.error
    import urllib.request

    outcome: list[Exception] = []

    def connect():
        try:
            urllib.request.urlopen(url, timeout=_CONNECT_TIMEOUT_SEC).close()
        except urllib.error.HTTPError as answer:
            answer.close()  # Not the page, but an answer: the server is there.
        except (OSError, ValueError) as error:
            outcome.append(error)

    thread = threading.Thread(target=connect, daemon=True)
    thread.start()
    thread.join(_CONNECT_TIMEOUT_SEC + 1)
    if thread.is_alive():
        raise TimeoutError(f"no answer from {url} within {_CONNECT_TIMEOUT_SEC + 1} s")
    if outcome:
        raise outcome[0]
