"""Finds the source of Fashion-MNIST without reading it.

Searches the given folder, `$FASHION_MNIST_DIR`, the directory of TensorFlow Datasets (TFDS), and
last the network.
"""

import dataclasses
import os
import pathlib
import threading
from collections.abc import Mapping

from app.runtime.errors import DataError, reason_of

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
# Download location used by TFDS 4.9.10.
DOWNLOAD_URL = "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/"
FILES, PREPARED, TO_DOWNLOAD = "files", "prepared", "to download"
_CONNECT_TIMEOUT_SEC = 8


class DataMissingError(DataError):
    """Fashion-MNIST was not found anywhere. Damaged data raises `DataError`."""


@dataclasses.dataclass(frozen=True)
class DataSource:
    """Describes where to load Fashion-MNIST from.

    Attributes:
        kind: `FILES` for the four original files, `PREPARED` for a directory prepared by TFDS,
            `TO_DOWNLOAD` for one that needs the network.
        folder: folder of the files, or TFDS's data directory.
        named_by: the flag or variable that names the folder, or "TFDS".
        paths: name of each original file → its path; empty without the files.
        looked: the places searched before.
    """

    kind: str
    folder: pathlib.Path
    named_by: str
    paths: Mapping[str, pathlib.Path] = dataclasses.field(default_factory=dict)
    looked: tuple[str, ...] = ()


def find_data_source(data_dir: str | None, environ: Mapping[str, str] = os.environ) -> DataSource:
    """Finds the first place that has Fashion-MNIST or can provide it.

    Args:
        data_dir: a folder with the four files, compressed or not, or a TFDS data directory; if
            given, no other place is searched.
        environ: environment variables.

    Raises:
        DataMissingError: `data_dir` does not contain the dataset.
        DataError: a place cannot be read.
    """
    try:
        if data_dir:
            return _find_in(_folder(data_dir), "--data_dir")
        return _find_in_default_places(environ)
    except PermissionError as error:
        raise DataError(
            f"{error.filename}: {reason_of(error)}; check the permissions of the folder"
        ) from error


def _find_in_default_places(environ: Mapping[str, str]) -> DataSource:
    tfds_dir = _folder(environ.get("TFDS_DATA_DIR") or "~/tensorflow_datasets")
    places = {"TFDS": tfds_dir, "TFDS downloads": tfds_dir / "downloads" / "manual"}
    if environ.get("FASHION_MNIST_DIR"):
        places = {"FASHION_MNIST_DIR": _folder(environ["FASHION_MNIST_DIR"]), **places}
    for named_by, folder in places.items():
        try:
            return _find_in(folder, named_by)
        except DataMissingError:
            continue
    looked = tuple(f"{named_by}={folder}" for named_by, folder in places.items())
    return DataSource(TO_DOWNLOAD, tfds_dir, "TFDS", looked=looked)


def _find_in(folder: pathlib.Path, named_by: str) -> DataSource:
    """Finds the dataset in a folder: the original files, or what TFDS has prepared."""
    paths = {
        name: path
        for name in SHA256
        for path in (folder / name, folder / f"{name}.gz")  # The last one that exists.
        if path.is_file()
    }
    missing = [name for name in SHA256 if name not in paths]
    if not missing:
        return DataSource(FILES, folder, named_by, paths)
    if any(folder.glob("fashion_mnist/*/dataset_info.json")):
        return DataSource(PREPARED, folder, named_by)
    what = "no such folder" if not folder.is_dir() else f"{', '.join(missing)} missing there"
    raise DataMissingError(f"{named_by}={folder}: {what}; {HOW_TO_GET}")


def _folder(name: str) -> pathlib.Path:
    try:
        folder = pathlib.Path(name).expanduser()
        folder.is_dir()
        return folder
    except (OSError, RuntimeError, ValueError) as error:
        raise DataMissingError(f"{name}: not a folder ({error}); {HOW_TO_GET}") from error


def check_connection(url: str, timeout_sec: float = _CONNECT_TIMEOUT_SEC) -> None:
    """Raises `OSError` within 10 s unless the server answers; TFDS itself would retry for minutes.

    Uses a thread, because a name lookup has no timeout.
    """
    import urllib.error
    import urllib.request

    outcome: list[Exception] = []

    def connect() -> None:
        try:
            urllib.request.urlopen(url, timeout=timeout_sec).close()
        except urllib.error.HTTPError as answer:
            answer.close()  # Any answer shows that the server is reachable.
        except (OSError, ValueError) as error:
            outcome.append(error)

    thread = threading.Thread(target=connect, daemon=True)
    thread.start()
    thread.join(timeout_sec + 1)
    if thread.is_alive():
        raise TimeoutError(f"no answer from {url} within {timeout_sec + 1:g} s")
    if outcome:
        raise outcome[0]
