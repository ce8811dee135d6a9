"""Compares refusals with the table of messages, `messages.txt`, and refuses values of each option.

The table has one command line for each message of the program, with the exit code and the last
line. A new command line is added there as `$ ARGUMENTS`; this command writes the table again, for
`git diff` to show the changes:

    UPDATE_MESSAGES=1 .venv/bin/python -m pytest -n 0 tests/cli/test_messages.py

The commands run in this process, in a folder with the files that `_write_files` writes.
"""

import gzip
import json
import os
import pathlib
import pickle
import re
import shlex
import shutil

import numpy as np
import pytest
from PIL import Image

from app.data import fashion_mnist
from app.data.data_sources import SHA256
from app.data.fashion_mnist import idx_bytes
from app.devices import gpus
from app.options.table import COMMANDS, TABLE, options_of
from models import MODELS
from tests.conftest import ROOT, idx_files
from tests.in_process import run_here, run_here_ok

TABLE_FILE = ROOT / "tests" / "cli" / "messages.txt"
_ENTRY = re.compile(r"^\$ (.*)\n(?:  (\d+) (.*)\n)?", re.MULTILINE)
ENTRIES = {line: (code, told) for line, code, told in _ENTRY.findall(TABLE_FILE.read_text("utf-8"))}
IS_UPDATE = "UPDATE_MESSAGES" in os.environ

# A case file, and what takes the place of its lines.
_CASE = """\
import keras, tensorflow as tf
def model():
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    return model
def data(n):
    return tf.data.Dataset.from_tensor_slices((tf.ones((8, 2)), tf.ones((8, 1)))).batch(n)
"""
_OTHER_CASES = {
    "syntax": ("def model()", "def model("),
    "exits": ("import keras,", "import sys; sys.exit(1)\nimport keras,"),
    "no_model": ("def model()", "def other()"),
    "not_compiled": ('    model.compile("sgd", "mse")\n', ""),
    "divides": ('"mse")', '"mse", 1 / 0)'),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("messages")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setitem(MODELS, "lenet", "tests.dense_network:build_dense_network")
        _write_files()
    return folder


@pytest.fixture(autouse=True)
def _machine(folder, monkeypatch, no_gpu):
    """A machine with the files of the folder, without GPUs, network and other data."""

    def refuse(url):
        raise OSError("Network is unreachable")

    monkeypatch.chdir(folder)
    monkeypatch.setitem(MODELS, "lenet", "tests.dense_network:build_dense_network")
    monkeypatch.delenv("FASHION_MNIST_DIR", raising=False)
    monkeypatch.setenv("TFDS_DATA_DIR", "tfds")
    monkeypatch.setattr(fashion_mnist, "check_connection", refuse)
    monkeypatch.setattr(gpus, "gpu_obstacles", list)


@pytest.fixture(scope="module")
def outcomes():
    """The outcome of each command line that was run; at the end written to the table, if asked."""
    found: dict[str, str] = {}
    yield found
    if IS_UPDATE:
        text = TABLE_FILE.read_text("utf-8")
        written = _ENTRY.sub(
            lambda m: f"$ {m[1]}\n  {found[m[1]]}\n" if m[1] in found else m[0], text
        )
        TABLE_FILE.write_text(written, "utf-8")


@pytest.mark.parametrize("line", ENTRIES)
def test_the_table_of_messages(line, folder, outcomes):
    before = _names(folder)
    result = run_here(*shlex.split(line))
    (told,) = [each for each in result.stderr.splitlines() if not each.startswith("WARNING: ")]
    assert told.startswith("error: ") and told.isprintable()
    assert _names(folder) == before  # What is refused leaves no directory.
    outcomes[line] = f"{result.returncode} {told.replace(str(folder), 'FOLDER')}"
    assert IS_UPDATE or outcomes[line] == " ".join(ENTRIES[line])


def _names(folder):
    return {path.name for pattern in ("*", "runs/*") for path in folder.glob(pattern)}


# The least and the largest number; a number that is not whole is above the first.
BOUNDS = {
    ("epochs", "steps"): (1, 100_000), ("seed",): (0, 2**32 - 1),
    ("global_batch_size", "num_train_examples"): (1, 60_000), ("learning_rate",): (0, 3.4e38),
    ("num_gpus", "num_devices", "model_parallel", "num_workers"): (1, 64),
    ("accumulate_steps", "micro_batches"): (1, 1024), ("shard_weights",): (1, 1000),
    ("max_restarts",): (0, 1000), ("start_timeout_sec",): (1, 1_000_000),
    ("stall_timeout_sec",): (0, 1_000_000), ("checkpoint_every",): (1, 1_000_000_000),
    ("verify_every",): (0, 1_000_000_000), ("verbosity",): (-1, 1), ("repeats",): (1, 10_000),
}  # fmt: skip
BOUNDS_OF = {name: bounds for names, bounds in BOUNDS.items() for name in names}


def wrong_values(option):
    """Yields texts that an option refuses, and a part of what is said of each."""
    yield "", "has no value"
    if option.kind is bool:
        yield "maybe", "true or false"
    elif option.choices:
        yield "nonsense", f"one of {', '.join(option.choices)}"
    elif option.kind is not str:
        low, high = BOUNDS_OF[option.name]
        below, above, allowed = low - 1, high + 1, f"between {low} and {high}"
        if option.kind is float:
            below, above, allowed = low, 2 * high, f"above {low}, at most {high:g}"
        before = f"{high}," if option.is_list else ""
        for wrong in (below, above, "x", "nan"):
            yield f"{before}{wrong}", allowed
    if option.is_list and not option.repeats:
        one = option.choices[0] if option.choices else "7"
        yield f"{one},{one}", "must name each value once"


def test_each_option_refuses_numbers_out_of_bounds_and_other_types():
    for option in TABLE:
        if option.is_word:
            continue
        for text, told in wrong_values(option):
            result = run_here(option.commands[0], f"--{option.name}={text}")
            (line,) = result.stderr.splitlines()
            assert (result.returncode, result.stdout) == (2, ""), line
            assert line.startswith(f"error: --{option.name} ") and told in line
        if option.bounds:
            low, high = BOUNDS_OF[option.name]
            for allowed in (high, low if option.kind is int else 1e-9):
                option.parse(str(allowed))


def test_each_command_refuses_an_option_of_another():
    for command in COMMANDS:
        other = next(row.name for row in TABLE if row.name not in options_of(command))
        told = f"error: --{other} is not an option of {command}, only of "
        assert run_here(command, f"--{other}=1").stderr.startswith(told)


def _write_files():
    theirs = pathlib.Path("theirs")
    theirs.mkdir()
    (theirs / "file").write_text("of another program")
    _write_data()
    _write_images(pathlib.Path("images"))
    _write_runs(pathlib.Path("runs"))
    _write_cases(pathlib.Path("cases"))


def _write_data():
    """Writes images in the right format, which are not Fashion-MNIST, and damaged copies."""
    train_images, train_labels, test_images, test_labels = SHA256
    contents = idx_files(30, 10)
    packed = {name: gzip.compress(content, 0, mtime=0) for name, content in contents.items()}
    images, labels = packed[train_images], contents[train_labels]
    changes = {
        "other": {},
        "truncated": {train_images: images[: len(images) // 2]},
        "web_page": {train_images: b"<!DOCTYPE html><html>not found</html>"},
        "empty": {train_images: b""},
        "swapped": {train_images: packed[train_labels], train_labels: images},
        "fewer_labels": {train_labels: gzip.compress(idx_bytes(np.zeros(29, np.uint8)))},
        "more_bytes": {train_labels: gzip.compress(labels + b"x")},
        "label_10": {test_labels: gzip.compress(contents[test_labels][:-1] + b"\x0a")},
        "other_test": {test_images: gzip.compress(contents[test_images][:-1] + b"\x00")},
        "missing": {test_labels: None},
    }
    for name, changed in changes.items():
        path = pathlib.Path("data", name)
        path.mkdir(parents=True)
        for file, content in {**packed, **changed}.items():
            if content is not None:
                (path / f"{file}.gz").write_bytes(content)
    prepared = pathlib.Path("data", "tfds", "fashion_mnist", "3.0.1")
    prepared.mkdir(parents=True)
    (prepared / "dataset_info.json").write_text("{}")


def _write_images(path):
    (path / "folder.png").mkdir(parents=True)
    (path / "text.png").write_text("not a picture")
    (path / "photo.jpg").write_bytes(b"")
    Image.fromarray(np.zeros((28, 28), np.uint16)).save(path / "deep.png")
    Image.fromarray(np.zeros((30, 30), np.uint8)).save(path / "large.png")
    (path / "pickled.npy").write_bytes(pickle.dumps([]))
    np.save(path / "float.npy", np.zeros((28, 28), np.float32))
    for name, shape in (("no_image", (0, 28, 28)), ("nested", (2, 2, 28, 28))):
        np.save(path / f"{name}.npy", np.zeros(shape, np.uint8))


def _write_runs(path):
    """Trains one run; writes damaged and unfinished copies of it."""
    run_here_ok(
        *("train", "--data_dir=data/other", "--allow_unverified_data", "--epochs=1"),
        *("--device=cpu", f"--out={path}/finished"),
    )
    config = json.loads((path / "finished" / "config.json").read_text())
    others = {"begun": {}, "verified": {"command": "verify"}, "compared": {"strategy": "single,x"}}
    for name, changes in others.items():
        (path / name).mkdir()
        (path / name / "config.json").write_text(json.dumps({**config, **changes}))
    for name in ("damaged", "older", "link", "truncated"):
        shutil.copytree(path / "finished", path / name)
    (damaged,) = (path / "damaged").rglob("*.safetensors")
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"\x01")
    (older,) = (path / "older").rglob("*.safetensors")
    older.unlink()
    older.with_suffix("").mkdir()
    (path / "link" / "checkpoints").rename(path / "link" / "moved")
    (path / "link" / "checkpoints").symlink_to("moved")
    (path / "truncated" / "summary.json").write_text("")


def _write_cases(path):
    path.mkdir()
    (path / "right.py").write_text(_CASE)
    for name, (old, new) in _OTHER_CASES.items():
        assert old in _CASE
        (path / f"{name}.py").write_text(_CASE.replace(old, new))
