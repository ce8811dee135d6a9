"""Finds, verifies and loads Fashion-MNIST, or generates images in its place.

TFDS is TensorFlow Datasets. From every source, the arrays are those of the four original files, in
their order, which their SHA-256 verifies.
"""

import contextlib
import dataclasses
import gzip
import hashlib
import os
import pathlib
import struct
import threading
import urllib.error
import urllib.request
import zlib
from typing import TYPE_CHECKING

import numpy as np

from app import console
from app.data import synthetic
from app.errors import DataError, reason_of

if TYPE_CHECKING:
    from app.options import Config

CLASS_NAMES = (
    "t-shirt", "trouser", "pullover", "dress", "coat",
    "sandal", "shirt", "sneaker", "bag", "ankle boot",
)  # fmt: skip
NUM_CLASSES = len(CLASS_NAMES)
IMAGE_SHAPE = (28, 28, 1)
# Name of each original file → SHA-256 of its decompressed content.
# Reference: H. Xiao et al., "Fashion-MNIST: a Novel Image Dataset", 2017.
SHA256 = {
    "train-images-idx3-ubyte": "c59f468a2f672dc815687fe0f83887768d799fd8a3f3276145d20f83aa44d888",
    "train-labels-idx1-ubyte": "bad3541b69d912435c50bb6ba87bec294ff4f6a2e1246121d8633921760443d9",
    "t10k-images-idx3-ubyte": "5b4141f0afbad91edebe8549f8fcffe087ea10ca49f1dbef5c9a5cd8815ce37b",
    "t10k-labels-idx1-ubyte": "0402a96d92fd2663957122ceb108a494c5af83dab82d92729df917d7dec38c34",
}
HOW_TO_GET = (
    "put train-images-idx3-ubyte.gz, train-labels-idx1-ubyte.gz, t10k-images-idx3-ubyte.gz and"
    " t10k-labels-idx1-ubyte.gz into a folder and give it as --data_dir"
)
DOWNLOAD_URL = "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/"  # Of TFDS 4.9.10.
_MAX_FILE_BYTES = 64 << 20


class DataMissingError(DataError):
    """Fashion-MNIST was not found. Damaged data raises `DataError`."""


@dataclasses.dataclass(frozen=True)
class ImageDataset:
    """Images of ten classes, uint8 `(N, 28, 28, 1)`, and their labels, uint8 `(N,)` from 0 to 9."""

    name: str  # "fashion_mnist" or "synthetic"; shown in plots and files.
    train_images: np.ndarray
    train_labels: np.ndarray
    test_images: np.ndarray
    test_labels: np.ndarray

    @property
    def num_train_examples(self) -> int:
        """Number of training images."""
        return len(self.train_images)

    @property
    def num_test_examples(self) -> int:
        """Number of test images."""
        return len(self.test_images)

    def sha256(self) -> str:
        """Returns a hash of all images and labels, in order."""
        arrays = (self.train_images, self.train_labels, self.test_images, self.test_labels)
        return hashlib.sha256(b"".join(array.tobytes() for array in arrays)).hexdigest()

    def sha256_of_test_part(self) -> str:
        """Returns a hash of the test images and labels."""
        return hashlib.sha256(self.test_images.tobytes() + self.test_labels.tobytes()).hexdigest()

    def with_train_subset(self, num_examples: int, seed: int) -> "ImageDataset":
        """Returns the dataset with some training images, in their order, equally many per class.

        If they do not divide evenly, the first classes have one more.
        """
        chosen = _balanced_subset(self.train_labels, num_examples, seed)
        return dataclasses.replace(
            self, train_images=self.train_images[chosen], train_labels=self.train_labels[chosen]
        )

    def with_test_subset(self, num_examples: int, seed: int) -> "ImageDataset":
        """Returns the dataset with some test images, chosen like those of `with_train_subset`."""
        chosen = _balanced_subset(self.test_labels, num_examples, seed)
        return dataclasses.replace(
            self, test_images=self.test_images[chosen], test_labels=self.test_labels[chosen]
        )


def _balanced_subset(labels: np.ndarray, num_examples: int, seed: int) -> np.ndarray:
    """Returns the sorted indices of examples, drawn in rounds of one example of each class."""
    order = np.random.default_rng(seed).permutation(len(labels))
    shuffled, rounds = labels[order], np.empty(len(labels), np.int64)
    for label in range(NUM_CLASSES):
        members = shuffled == label
        rounds[members] = np.arange(members.sum())
    return np.sort(order[np.lexsort((shuffled, rounds))][:num_examples])


def load_data(config: "Config") -> ImageDataset:
    """Loads the dataset of `config`, with as many images as it asks for."""
    dataset, seed = load_dataset(config.data.dataset, config.data.data_dir), config.training.seed
    for part, size, subset in (
        ("train", dataset.num_train_examples, ImageDataset.with_train_subset),
        ("test", dataset.num_test_examples, ImageDataset.with_test_subset),
    ):
        number = getattr(config.data, f"num_{part}_examples")
        if number is not None and number > size:
            raise DataError(
                f"--num_{part}_examples={number} must be at most {size}, the size of the"
                f" {part.replace('train', 'training')} set"
            )
        dataset = subset(dataset, number, seed) if number else dataset
    return dataset


def load_dataset(name: str, data_dir: str | None) -> ImageDataset:
    """Loads all images of `--dataset` and `--data_dir`.

    "auto" replaces missing images by generated ones, after a warning, but neither damaged images
    nor those of a given `data_dir`.

    Raises:
        DataError: the dataset is missing, damaged, or not Fashion-MNIST.
    """
    if name != "synthetic":
        try:
            return load_fashion_mnist(data_dir)
        except DataMissingError as error:
            if name == "fashion_mnist" or data_dir:
                raise
            console.warn(
                "GENERATED images in place of Fashion-MNIST: accuracies are not comparable."
                f" {error.problem}. For the real data, {HOW_TO_GET}"
            )
    return ImageDataset("synthetic", *synthetic.generate_synthetic())


def load_fashion_mnist(data_dir: str | None) -> ImageDataset:
    """Finds or downloads, verifies and loads Fashion-MNIST."""
    folder, paths = find_files(data_dir)
    contents = {name: _read(path) for name, path in paths.items()} or _read_prepared(folder)
    arrays = []
    for name, expected in SHA256.items():  # Of the whole file: its header has the sizes.
        digest = hashlib.sha256(contents[name]).hexdigest()
        if digest != expected:
            raise DataError(
                f"{paths.get(name, folder)}: {len(contents[name]):,} bytes with SHA-256"
                f" {digest[:12]}…, that of Fashion-MNIST's {name} is {expected[:12]}…; download it"
                " again"
            )
        is_images = "images" in name
        array = np.frombuffer(contents[name], np.uint8, offset=16 if is_images else 8)
        arrays.append(array.reshape(-1, *IMAGE_SHAPE) if is_images else array)
    return ImageDataset("fashion_mnist", *arrays)


def find_files(data_dir: str | None) -> tuple[pathlib.Path, dict[str, pathlib.Path]]:
    """Finds a folder with the four files, compressed or not, or a TFDS data directory.

    Searches `data_dir` only, or else `$FASHION_MNIST_DIR`, then TFDS, then the network.

    Returns:
        The folder, and file name → path; no paths if TFDS has prepared the dataset there, or will.
    """
    if data_dir:
        return _find_in("--data_dir", data_dir)
    tfds_dir = os.environ.get("TFDS_DATA_DIR") or os.path.expanduser("~/tensorflow_datasets")
    places = {"TFDS": tfds_dir, "TFDS downloads": os.path.join(tfds_dir, "downloads", "manual")}
    if folder := os.environ.get("FASHION_MNIST_DIR"):
        places = {"FASHION_MNIST_DIR": folder, **places}
    for named_by, folder in places.items():
        with contextlib.suppress(DataMissingError):
            return _find_in(named_by, folder)
    try:
        check_connection()
    except OSError as error:
        looked = ", ".join(f"{named_by}={folder}" for named_by, folder in places.items())
        raise DataMissingError(
            f"Fashion-MNIST is in none of {looked} and cannot be downloaded ({reason_of(error)});"
            f" {HOW_TO_GET}"
        ) from error
    return pathlib.Path(tfds_dir).expanduser(), {}


def is_prepared(tfds_dir: pathlib.Path) -> bool:
    """Returns whether TFDS has prepared the dataset in a folder."""
    return any(tfds_dir.glob("fashion_mnist/*/dataset_info.json"))


def _find_in(named_by: str, name: str) -> tuple[pathlib.Path, dict[str, pathlib.Path]]:
    try:
        folder = pathlib.Path(name).expanduser()
        paths = {
            file_name: path
            for file_name in SHA256
            for path in (folder / file_name, folder / f"{file_name}.gz")  # The last that exists.
            if path.is_file()
        }
        missing = [file_name for file_name in SHA256 if file_name not in paths]
        if not missing or is_prepared(folder):
            return folder, {} if missing else paths
        what = f"{', '.join(missing)} missing there" if folder.is_dir() else "no such folder"
    except (OSError, RuntimeError) as error:  # RuntimeError: no such user's home.
        raise DataError(
            f"{named_by}={name}: cannot be read ({reason_of(error)}); check the name and the"
            " permissions of the folder"
        ) from error
    raise DataMissingError(f"{named_by}={folder}: {what}; {HOW_TO_GET}")


def check_connection(url: str = DOWNLOAD_URL, timeout_sec: float = 8.0) -> None:
    """Raises `OSError` unless the server answers; TFDS would retry for minutes."""
    failure: OSError | None = TimeoutError(f"no answer within {timeout_sec:g} s")

    def connect() -> None:
        nonlocal failure
        try:
            with contextlib.suppress(urllib.error.HTTPError):  # It is an answer.
                urllib.request.urlopen(url, timeout=timeout_sec).close()
            failure = None
        except Exception as error:  # An invalid answer raises various exceptions.
            failure = OSError(reason_of(error))

    # The look-up of a name has no time-out, but a thread can be left alone.
    thread = threading.Thread(target=connect, daemon=True)
    thread.start()
    thread.join(timeout_sec)
    if failure:
        raise failure


def _read(path: pathlib.Path) -> bytes:
    """Returns the decompressed content, at most one byte more than the largest valid file."""
    try:
        with (gzip.open if path.suffix == ".gz" else open)(path, "rb") as file:
            return file.read(_MAX_FILE_BYTES + 1)
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise DataError(f"{path}: not an intact gzip file ({error}); download it again") from error
    except OSError as error:
        raise DataError(f"{path}: {error.strerror}; check its permissions") from error


def _read_prepared(tfds_dir: pathlib.Path) -> dict[str, bytes]:
    """Returns the four original files from TFDS, which downloads and prepares them if need be."""
    import tensorflow_datasets as tfds
    from tensorflow_datasets.core.hashing import Hasher  # Private; TFDS has no public function.

    contents = []
    try:
        builder = tfds.builder("fashion_mnist", data_dir=tfds_dir)
        if not is_prepared(tfds_dir):
            builder.download_and_prepare()
        for split in ("train", "test"):
            examples = tfds.as_numpy(builder.as_dataset(split=split, batch_size=-1))
            # TFDS orders examples by a hash of their index, salted with the name of the split.
            written_order = sorted(range(len(examples["label"])), key=Hasher(split).hash_key)
            file_order = np.argsort(written_order)
            contents.append(idx_bytes(examples["image"][file_order, ..., 0]))
            contents.append(idx_bytes(examples["label"][file_order].astype(np.uint8)))
    except Exception as error:  # A download and damaged records raise various exceptions.
        raise DataError(
            f"{tfds_dir}/fashion_mnist: cannot be read ({reason_of(error)}); delete it, so that"
            " TFDS prepares it again"
        ) from error
    return dict(zip(SHA256, contents, strict=True))


def idx_bytes(array: np.ndarray) -> bytes:
    """Returns a uint8 array as a file in the IDX format of Y. LeCun's page on MNIST."""
    header = struct.pack(f">{1 + array.ndim}I", 0x800 | array.ndim, *array.shape)
    return header + array.tobytes()
