"""Fashion-MNIST is found and verified, a user's images are loaded.

`messages.txt` has what is refused.
"""

import gzip
import http.server
import os
import pathlib
import shutil
import threading

import numpy as np
import pytest
from PIL import Image

from app.data import data_sources, fashion_mnist
from app.data.data_sources import SHA256, DataMissingError
from app.data.fashion_mnist import idx_bytes, load_fashion_mnist
from app.data.image_files import load_image_files
from app.runtime.errors import DataError
from tests.conftest import idx_files

TRAIN_IMAGES, _, TEST_IMAGES, TEST_LABELS = SHA256
REAL = os.environ.get("FASHION_MNIST_DIR")
needs_real = pytest.mark.skipif(not REAL, reason="FASHION_MNIST_DIR is not set")


@pytest.fixture
def folder(tmp_path):
    """A folder with packed files of 30 and 10 images."""
    for name, content in idx_files(30, 10).items():
        write(tmp_path, name, content)
    return tmp_path


def write(folder, name, content):
    (folder / f"{name}.gz").write_bytes(gzip.compress(content, 1))


def load(folder, **options):
    return load_fashion_mnist(str(folder), allow_unverified=True, **options)


def test_loads_compressed_and_unpacked_files(folder):
    packed = load(folder)
    for name in SHA256:
        content = gzip.decompress((folder / f"{name}.gz").read_bytes())
        (folder / name).write_bytes(content)
        (folder / f"{name}.gz").unlink()
    environ = {"FASHION_MNIST_DIR": str(folder)}
    unpacked = load_fashion_mnist(None, allow_unverified=True, environ=environ)
    assert unpacked.sha256() == packed.sha256()
    assert packed.train_images.shape == (30, 28, 28, 1) and packed.test_labels.shape == (10,)


def test_a_file_with_a_part_of_an_image_or_without_end_is_refused(folder, monkeypatch):
    monkeypatch.setattr(fashion_mnist, "_MAX_FILE_BYTES", 100_000)
    for extra, read in ((783, "24,319"), (10**6, "100,001")):
        write(folder, TRAIN_IMAGES, idx_bytes(np.zeros((30, 28, 28), np.uint8)) + bytes(extra))
        with pytest.raises(DataError, match=f"{read} bytes that begin with 00000803 0000001e"):
            load(folder)


def test_only_data_that_is_missing_is_replaced(folder, tmp_path):
    """Generated images take the place of missing ones, and of nothing else."""
    environ = {"TFDS_DATA_DIR": str(tmp_path / "tfds")}
    manual = tmp_path / "tfds" / "downloads" / "manual"
    shutil.copytree(folder, manual, ignore=shutil.ignore_patterns("tfds"))
    dataset = load_fashion_mnist(None, allow_unverified=True, environ=environ)
    assert len(dataset.train_images) == 30
    (folder / f"{TEST_LABELS}.gz").unlink()
    for path in (folder, folder / "nowhere"):
        with pytest.raises(DataMissingError):
            load(path)
    prepared = prepare(folder)
    (manual / f"{TEST_LABELS}.gz").write_bytes(b"")
    for damaged in (prepared, manual):
        with pytest.raises(DataError) as refusal:
            load(damaged)
        assert not isinstance(refusal.value, DataMissingError)
    with pytest.raises(DataError, match="begin with nothing"):
        load_fashion_mnist(None, allow_unverified=True, environ=environ)


def prepare(folder):
    """Makes a folder look as if TFDS had prepared the data set in it; returns the folder."""
    prepared = folder / "fashion_mnist" / "3.0.1"
    prepared.mkdir(parents=True)
    (prepared / "dataset_info.json").write_text("{}")
    return folder


def test_what_tfds_has_prepared_comes_in_the_order_of_the_files(folder, tmp_path, monkeypatch):
    """TFDS is replaced; it orders examples by a hash of their index."""
    import tensorflow_datasets as tfds
    from tensorflow_datasets.core.hashing import Hasher

    files = load(folder)

    class Prepared:
        def as_dataset(self, split, batch_size):
            images, labels = getattr(files, f"{split}_images"), getattr(files, f"{split}_labels")
            order = sorted(range(len(labels)), key=Hasher(split).hash_key)
            return {"image": images[order], "label": labels[order].astype(np.int64)}

    monkeypatch.setattr(tfds, "builder", lambda name, data_dir: Prepared())
    monkeypatch.setattr(tfds, "as_numpy", lambda dataset: dataset)
    assert load(prepare(tmp_path / "tfds")).sha256() == files.sha256()


def test_any_answer_of_the_server_is_a_connection_and_none_is_given_up():
    handler = http.server.BaseHTTPRequestHandler  # Answers that it knows no method.
    with http.server.HTTPServer(("127.0.0.1", 0), handler) as server:
        url, server.timeout = f"http://127.0.0.1:{server.server_port}/", 30
        thread = threading.Thread(target=server.handle_request)
        thread.start()
        data_sources.check_connection(url)
        thread.join(30)
        with pytest.raises(OSError):
            data_sources.check_connection(url, 0.2)  # It takes connections, and does not answer.
    with pytest.raises(OSError):
        data_sources.check_connection(url)  # The server is stopped.


@needs_real
def test_real_data_is_accepted_and_one_altered_pixel_is_found(tmp_path):
    dataset = load_fashion_mnist(REAL)
    assert dataset.name == "fashion_mnist"
    assert dataset.train_images.shape == (60_000, 28, 28, 1)
    assert np.bincount(dataset.test_labels).tolist() == [1000] * 10
    for path in pathlib.Path(REAL).glob("*.gz"):
        shutil.copy(path, tmp_path)
    content = bytearray(gzip.decompress((tmp_path / f"{TEST_IMAGES}.gz").read_bytes()))
    content[-1] ^= 1
    write(tmp_path, TEST_IMAGES, bytes(content))
    with pytest.raises(DataError, match=rf"{TEST_IMAGES}.*SHA-256"):
        load_fashion_mnist(str(tmp_path))


@pytest.mark.slow
@needs_real
def test_what_tfds_prepares_gives_the_same_arrays_in_the_same_order(tmp_path):
    import tensorflow_datasets as tfds

    # In place of the network.
    files = tfds.download.DownloadConfig(manual_dir=REAL, max_examples_per_split=100)
    builder = tfds.builder("fashion_mnist", data_dir=tmp_path)
    builder.download_and_prepare(download_config=files)
    environ = {"TFDS_DATA_DIR": str(tmp_path)}
    prepared = load_fashion_mnist(None, allow_unverified=True, environ=environ)
    files = load_fashion_mnist(REAL)
    for name in ("train_images", "train_labels", "test_images", "test_labels"):
        np.testing.assert_array_equal(getattr(prepared, name), getattr(files, name)[:100])


# A user's images


def save_png(path, pixels):
    Image.fromarray(pixels).save(path)
    return str(path)


def test_png_and_npy_come_in_order_with_names(tmp_path):
    pixels = np.random.default_rng(0).integers(0, 256, (28, 28), dtype=np.uint8)
    png = save_png(tmp_path / "a b.PNG", pixels)
    np.save(tmp_path / "one.npy", pixels)
    np.save(tmp_path / "two.npy", np.stack([pixels, 255 - pixels])[..., None])
    names, images = load_image_files([png, f"{tmp_path}/one.npy", f"{tmp_path}/two.npy"])
    assert names == [png, f"{tmp_path}/one.npy", f"{tmp_path}/two.npy[0]", f"{tmp_path}/two.npy[1]"]
    assert images.shape == (4, 28, 28, 1) and images.dtype == np.uint8
    for loaded, expected in zip(images, [pixels, pixels, pixels, 255 - pixels], strict=True):
        np.testing.assert_array_equal(loaded[..., 0], expected)


def test_a_header_that_promises_too_much_is_not_believed(tmp_path):
    header = b"{'descr': '|u1', 'fortran_order': False, 'shape': (99999999999, 28, 28), }"
    header = header.ljust(117) + b"\n"
    content = b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header
    (tmp_path / "huge.npy").write_bytes(content)
    with pytest.raises(DataError, match=r"huge\.npy"):
        load_image_files([f"{tmp_path}/huge.npy"])


def test_colour_becomes_luma(tmp_path):
    """ITU-R BT.601: 0.299 R' + 0.587 G' + 0.114 B'."""
    pixels = np.random.default_rng(1).integers(0, 256, (28, 28, 3), dtype=np.uint8)
    loaded = load_image_files([save_png(tmp_path / "rgb.png", pixels)])[1][0, ..., 0].astype(int)
    assert np.abs(loaded - pixels @ [0.299, 0.587, 0.114]).max() <= 1
    opaque = np.dstack([pixels, np.full((28, 28), 128, np.uint8)])
    with_alpha = load_image_files([save_png(tmp_path / "rgba.png", opaque)])[1][0, ..., 0]
    np.testing.assert_array_equal(with_alpha, loaded)
