"""Four logical CPU devices for every test, made before TensorFlow starts, and small helpers."""

import os
import pathlib
import shutil
import subprocess
import sys

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import numpy as np
import pytest
import tensorflow as tf

from app.data.data_sources import SHA256
from app.data.synthetic import generate_synthetic
from app.devices.device_setup import keep_order_of_summation
from idx_files import idx_bytes
from models import MODELS

ROOT = pathlib.Path(__file__).parents[1]
NUM_LOGICAL_CPUS = 4
CPUS = [f"/device:CPU:{i}" for i in range(NUM_LOGICAL_CPUS)]

tf.config.set_logical_device_configuration(
    tf.config.list_physical_devices("CPU")[0],
    [tf.config.LogicalDeviceConfiguration()] * NUM_LOGICAL_CPUS,
)
keep_order_of_summation()
tf.config.threading.set_intra_op_parallelism_threads(1)


@pytest.hookimpl(tryfirst=True)  # Before `-m` chooses.
def pytest_collection_modifyitems(items):
    for item in items:
        if not any(item.iter_markers("e2e")) and not any(item.iter_markers("slow")):
            item.add_marker("unit")


@pytest.fixture(autouse=True)
def _seeds():
    keras.utils.set_random_seed(0)


@pytest.fixture
def images():
    """40 random images with labels of all ten classes."""
    generator = np.random.default_rng(0)
    pixels = generator.integers(0, 256, (40, 28, 28, 1), dtype=np.uint8)
    return pixels, (np.arange(40) % 10).astype(np.uint8)


@pytest.fixture(scope="session")
def small_data(tmp_path_factory):
    """A folder with generated images in the four files of Fashion-MNIST: 1,000 and 200."""
    folder = tmp_path_factory.mktemp("small data")
    dataset = generate_synthetic(num_train=1000, num_test=200)
    arrays = dataset.train_images, dataset.train_labels, dataset.test_images, dataset.test_labels
    for name, array in zip(SHA256, arrays, strict=True):
        (folder / name).write_bytes(idx_bytes(array[..., 0] if array.ndim == 4 else array))
    return folder


def copy_program(folder: pathlib.Path) -> None:
    """Copies the program as it is cloned, so that it can be changed, and its runs/ are not ours."""
    shutil.copy(ROOT / "main.py", folder)
    ignored = shutil.ignore_patterns("__pycache__")
    for name in ("app", "models", "strategies"):
        shutil.copytree(ROOT / name, folder / name, ignore=ignored)


@pytest.fixture
def small_lenet(monkeypatch):
    """Trains a dense layer in place of LeNet, in this process: half the time goes into LeNet."""
    monkeypatch.setitem(MODELS, "lenet", "dense_network:build_dense_network")


@pytest.fixture
def no_gpu(monkeypatch):
    """A machine without GPUs, whatever this one has."""
    listed = tf.config.list_physical_devices
    monkeypatch.setattr(
        tf.config, "list_physical_devices", lambda kind=None: [] if kind == "GPU" else listed(kind)
    )


@pytest.fixture(scope="session")
def small_program(tmp_path_factory):
    """The folder of a copy of the program that trains a dense layer in place of LeNet."""
    folder = tmp_path_factory.mktemp("small program")
    copy_program(folder)
    shutil.copy(ROOT / "tests" / "dense_network.py", folder / "models" / "lenet.py")
    return folder


def program_environment(**changes) -> dict[str, str]:
    """Returns a user's environment: what silences TensorFlow here is not in it."""
    inherited = {k: v for k, v in os.environ.items() if k != "TF_CPP_MIN_LOG_LEVEL"}
    return {**inherited, **changes}


def run_main(
    *arguments, env=None, timeout=240, cwd=ROOT, program=ROOT
) -> subprocess.CompletedProcess:
    """Runs the program as a user does, output captured; asserts nothing."""
    return subprocess.run(
        [sys.executable, str(program / "main.py"), *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=timeout,
        cwd=cwd,
        env=program_environment(**(env or {})),
        check=False,
    )


def run_ok(*arguments, **options) -> subprocess.CompletedProcess:
    """Runs the program and asserts that it ends with 0."""
    return assert_ok(run_main(*arguments, **options))


def assert_ok(result: subprocess.CompletedProcess) -> subprocess.CompletedProcess:
    """Asserts that a run of the program ended with 0; returns it."""
    assert result.returncode == 0, result.stdout + result.stderr
    return result
