"""Creates four logical CPU devices before TensorFlow starts, and defines common fixtures.

The process that distributes the tests to the workers of pytest-xdist imports no TensorFlow.
"""

import contextlib
import gc
import gzip
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import time
from unittest import mock

import numpy as np
import pytest

from tests.tensorflow_graphs import number_device_groups, release_graphs

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
# A shell lets background jobs inherit that these are ignored.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)

ROOT = pathlib.Path(__file__).parents[1]
NUM_LOGICAL_CPUS = 4
# A worker gets whole files, these first, so that no long one is left for the end.
LONGEST = [
    "test_strategies", "test_verify", "test_commands", "test_training", "test_workers",
    "test_survival", "test_docs",
]  # fmt: skip
CPUS = [f"/device:CPU:{i}" for i in range(NUM_LOGICAL_CPUS)]


def pytest_configure(config):
    # Warnings are printed unless something else handles them, which pytest's plugin would.
    config.pluginmanager.set_blocked("logging-plugin")
    if not hasattr(config, "workerinput") and config.getoption("numprocesses", None):
        return  # This process only distributes the tests.
    from app.devices.import_tf import import_tensorflow

    tf = import_tensorflow()  # With the program's kernels and order of summation.
    tf.config.set_logical_device_configuration(
        tf.config.list_physical_devices("CPU")[0],
        [tf.config.LogicalDeviceConfiguration()] * NUM_LOGICAL_CPUS,
    )
    number_device_groups()
    tf.config.threading.set_intra_op_parallelism_threads(1)


@pytest.hookimpl(tryfirst=True)  # Before `-m` selects tests.
def pytest_collection_modifyitems(items):
    order = {name: number for number, name in enumerate(LONGEST)}
    items.sort(key=lambda item: order.get(item.path.stem, len(order)))


def pytest_collection_finish():
    """Lets the garbage collector run seldom: tracing creates many objects, which took a sixth."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(100_000, 50, 100)


@pytest.fixture(autouse=True)
def _seeds():
    import keras

    keras.utils.set_random_seed(0)


@pytest.fixture(autouse=True)
def _released_graphs():
    """Releases the graphs that a test has traced, which TensorFlow would keep: 3 MB each."""
    yield
    release_graphs()


@pytest.fixture(autouse=True, scope="module")
def _collected_garbage():
    yield
    gc.collect()


@pytest.fixture(autouse=True)
def _graph_optimizer(request):
    """Turns TensorFlow's optimizer of graphs off, which takes a third of the first call.

    Tests of bitwise equality, marked with `parity`, run the graphs that users run.
    """
    import tensorflow as tf

    is_off = request.node.get_closest_marker("parity") is None
    tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": is_off})


def idx_files(num_train: int, num_test: int) -> dict[str, bytes]:
    """Returns four files in the right format, with other content than Fashion-MNIST."""
    from app.data.fashion_mnist import SHA256, idx_bytes

    def content(name):
        num = num_train if name.startswith("train") else num_test
        pixels = (np.arange(num * 784) % 251).astype(np.uint8).reshape(num, 28, 28)
        return pixels if "images" in name else (np.arange(num) % 10).astype(np.uint8)

    return {name: idx_bytes(content(name)) for name in SHA256}


def write_images(folder: pathlib.Path, num_train: int, num_test: int) -> None:
    for name, content in idx_files(num_train, num_test).items():
        (folder / f"{name}.gz").write_bytes(gzip.compress(content, 1))


def generated(num_train: int, num_test: int, seed: int = 0):
    """Returns a data set of generated images."""
    from app.data.fashion_mnist import ImageDataset
    from app.data.synthetic import generate_synthetic

    arrays = generate_synthetic(seed=seed, num_train=num_train, num_test=num_test)
    return ImageDataset("synthetic", *arrays)


def make_small(patch: pytest.MonkeyPatch, num_train=1000, num_test=200) -> None:
    """Trains a dense layer in place of LeNet, on so many generated images, in this process."""
    from app.data.synthetic import generate_synthetic
    from models import MODELS

    patch.setitem(MODELS, "lenet", "tests.dense_network:build_dense_network")
    for name, number in (("num_train", num_train), ("num_test", num_test)):
        patch.setitem(generate_synthetic.__kwdefaults__, name, number)


@pytest.fixture
def small(monkeypatch):
    """Makes trainings in this process small; `small_program` does it for processes."""
    make_small(monkeypatch)


def copy_program(folder: pathlib.Path) -> None:
    """Copies the program, so that it can be changed; it generates 1,000 and 200 images."""
    folder.mkdir(exist_ok=True)
    shutil.copy(ROOT / "main.py", folder)
    ignored = shutil.ignore_patterns("__pycache__")
    for name in ("app", "lockstep", "models", "strategies", "examples"):
        shutil.copytree(ROOT / name, folder / name, ignore=ignored)
    synthetic = folder / "app" / "data" / "synthetic.py"
    text = synthetic.read_text()
    for large, few in (("num_train: int = 60_000", 1000), ("num_test: int = 10_000", 200)):
        assert text.count(large) == 1
        text = text.replace(large, f"{large.partition(':')[0]}: int = {few}")
    synthetic.write_text(text)


@pytest.fixture
def no_gpu(monkeypatch):
    """A machine without GPUs, also if this one has GPUs."""
    import tensorflow as tf

    listed = tf.config.list_physical_devices
    monkeypatch.setattr(
        tf.config, "list_physical_devices", lambda kind=None: [] if kind == "GPU" else listed(kind)
    )


@pytest.fixture
def no_data(monkeypatch):
    """A machine without Fashion-MNIST and without a network."""
    refuse = mock.Mock(side_effect=OSError("Network is unreachable"))
    monkeypatch.delenv("FASHION_MNIST_DIR", raising=False)
    monkeypatch.setenv("TFDS_DATA_DIR", "tfds")
    monkeypatch.setattr("app.data.fashion_mnist.check_connection", refuse)


@pytest.fixture(scope="session")
def small_program(tmp_path_factory):
    """A copy of the program that trains a dense layer in place of LeNet, on few images."""
    folder = tmp_path_factory.mktemp("small program")
    copy_program(folder)
    shutil.copy(ROOT / "tests" / "dense_network.py", folder / "models" / "lenet.py")
    return folder


def program_environment(**changes) -> dict[str, str]:
    """Returns a user's environment, without the variables that silence TensorFlow here."""
    inherited = {k: v for k, v in os.environ.items() if k != "TF_CPP_MIN_LOG_LEVEL"}
    return {**inherited, **changes}


def processes_of(folder) -> dict[int, str]:
    """Returns the running processes whose TMPDIR is a folder, with their environments."""
    found = {}
    for path in pathlib.Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            environment = path.read_bytes().decode(errors="replace")
            if f"TMPDIR={folder}" in environment.split("\0"):
                found[int(path.parent.name)] = environment
    return found


def wait_until(condition, timeout_sec=120):
    deadline = time.monotonic() + timeout_sec
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def run_python(*words, env=None, timeout=300, cwd=ROOT, **options) -> subprocess.CompletedProcess:
    """Runs Python in a user's environment, with captured output; asserts nothing."""
    return subprocess.run(
        [sys.executable, *map(str, words)], capture_output=True, text=True, timeout=timeout,
        cwd=cwd, env=program_environment(**(env or {})), check=False, **options,
    )  # fmt: skip


def run_main(*arguments, program=ROOT, **options) -> subprocess.CompletedProcess:
    """Runs the program as a user does; asserts nothing."""
    return run_python(program / "main.py", *arguments, **options)


def assert_ok(result: subprocess.CompletedProcess) -> subprocess.CompletedProcess:
    """Asserts that a run of the program exited with 0; returns it."""
    assert result.returncode == 0, result.stdout + result.stderr
    return result
