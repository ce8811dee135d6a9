"""Fashion-MNIST is found and verified; `messages.txt` has what is refused."""

import gzip
import hashlib
import http.server
import os
import pathlib
import shutil
import threading

import numpy as np
import pytest

from app.data import fashion_mnist
from app.data.fashion_mnist import (
    SHA256,
    DataMissingError,
    check_connection,
    load_data,
    load_fashion_mnist,
)
from app.errors import DataError
from app.options import Config
from tests.conftest import idx_files

TRAIN_IMAGES, _, TEST_IMAGES, TEST_LABELS = SHA256
REAL = os.environ.get("FASHION_MNIST_DIR")
needs_real = pytest.mark.skipif(not REAL, reason="FASHION_MNIST_DIR is not set")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder with packed files of 30 and 10 images, which pass for Fashion-MNIST."""
    for name, content in idx_files(30, 10).items():
        write(tmp_path, name, content)
        monkeypatch.setitem(SHA256, name, hashlib.sha256(content).hexdigest())
    monkeypatch.delenv("FASHION_MNIST_DIR", raising=False)
    monkeypatch.setenv("TFDS_DATA_DIR", str(tmp_path / "tfds"))
    return tmp_path


def write(folder, name, content):
    (folder / f"{name}.gz").write_bytes(gzip.compress(content, 1))


def test_loads_compressed_and_unpacked_files(folder, monkeypatch):
    packed = load_fashion_mnist(str(folder))
    for name in SHA256:
        content = gzip.decompress((folder / f"{name}.gz").read_bytes())
        (folder / name).write_bytes(content)
        (folder / f"{name}.gz").unlink()
    monkeypatch.setenv("FASHION_MNIST_DIR", str(folder))
    assert load_fashion_mnist(None).sha256() == packed.sha256()
    assert packed.train_images.shape == (30, 28, 28, 1) and packed.test_labels.shape == (10,)


def test_a_file_without_end_is_not_read_to_its_end_and_a_damaged_one_refused(folder, monkeypatch):
    monkeypatch.setattr(fashion_mnist, "_MAX_FILE_BYTES", 100_000)
    write(folder, TRAIN_IMAGES, bytes(10**6))
    with pytest.raises(DataError, match="100,001 bytes with SHA-256"):
        load_fashion_mnist(str(folder))
    header = gzip.compress(b"")[:10]
    (folder / f"{TRAIN_IMAGES}.gz").write_bytes(header + b"\xff" * 9)
    with pytest.raises(DataError, match="not an intact gzip file"):
        load_fashion_mnist(str(folder))


def test_only_data_that_is_missing_is_replaced(folder, tmp_path):
    manual = tmp_path / "tfds" / "downloads" / "manual"
    shutil.copytree(folder, manual, ignore=shutil.ignore_patterns("tfds"))
    assert len(load_fashion_mnist(None).train_images) == 30
    (folder / f"{TEST_LABELS}.gz").unlink()
    for path in (folder, folder / "nowhere"):
        with pytest.raises(DataMissingError):
            load_fashion_mnist(str(path))
    (manual / f"{TEST_LABELS}.gz").write_bytes(b"")
    prepared = folder / "fashion_mnist" / "3.0.1"
    prepared.mkdir(parents=True)
    (prepared / "dataset_info.json").write_text("{}")
    for damaged in (folder, manual):
        with pytest.raises(DataError) as refusal:
            load_fashion_mnist(str(damaged))
        assert not isinstance(refusal.value, DataMissingError)
    with pytest.raises(DataError, match="0 bytes with SHA-256"):
        load_data(Config.of(dataset="auto"))


def test_any_answer_of_the_server_is_a_connection_and_none_is_given_up():
    handler = http.server.BaseHTTPRequestHandler  # Answers that it knows no method.
    with http.server.HTTPServer(("127.0.0.1", 0), handler) as server:
        url, server.timeout = f"http://127.0.0.1:{server.server_port}/", 30
        thread = threading.Thread(target=server.handle_request)
        thread.start()
        check_connection(url)
        thread.join(30)
        with pytest.raises(OSError):
            check_connection(url, 0.2)  # It takes connections, and does not answer.
    with pytest.raises(OSError):
        check_connection(url)  # The server is stopped.


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
def test_what_tfds_prepares_gives_the_same_arrays_in_the_same_order(tmp_path, monkeypatch):
    import tensorflow_datasets as tfds

    download = tfds.download.DownloadConfig(manual_dir=REAL)  # In place of the network.
    builder = tfds.builder("fashion_mnist", data_dir=tmp_path)
    builder.download_and_prepare(download_config=download)
    monkeypatch.setenv("TFDS_DATA_DIR", str(tmp_path))
    monkeypatch.delenv("FASHION_MNIST_DIR")
    assert load_fashion_mnist(None).sha256() == load_fashion_mnist(REAL).sha256()
