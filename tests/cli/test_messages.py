"""Compares refusals with the table of messages, `messages.txt`.

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
import re
import shlex
import shutil

import pytest

from app.data.fashion_mnist import SHA256
from tests.conftest import ROOT, idx_files, make_small
from tests.in_process import run_here, run_here_ok

TABLE_FILE = ROOT / "tests" / "cli" / "messages.txt"
_ENTRY = re.compile(r"^\$ (.*)\n(?:  (\d+) (.*)\n)?", re.MULTILINE)
ENTRIES = {line: (code, told) for line, code, told in _ENTRY.findall(TABLE_FILE.read_text("utf-8"))}
IS_UPDATE = "UPDATE_MESSAGES" in os.environ


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Images that are not Fashion-MNIST, a run, and damaged copies of both."""
    folder = tmp_path_factory.mktemp("messages")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        make_small(patch, num_train=30, num_test=10)
        pathlib.Path("theirs").mkdir()
        pathlib.Path("theirs", "file").write_text("of another program")
        _write_data()
        _write_runs(pathlib.Path("runs"))
    return folder


@pytest.fixture(autouse=True)
def _machine(folder, monkeypatch, no_gpu, no_data):
    """A machine with the files of the folder, without GPUs, network and other data."""
    monkeypatch.chdir(folder)
    make_small(monkeypatch, num_train=30, num_test=10)


@pytest.fixture(scope="module")
def outcomes():
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


def _write_data():
    train_images, _, _, test_labels = SHA256
    packed = {
        name: gzip.compress(content, 0, mtime=0) for name, content in idx_files(30, 10).items()
    }
    changes = {
        "other": {},
        "truncated": {train_images: packed[train_images][:9000]},
        "web_page": {train_images: b"<!DOCTYPE html><html>not found</html>"},
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


def _write_runs(path):
    words = ("--dataset=synthetic", "--epochs=1", "--device=cpu", f"--out={path}/finished")
    run_here_ok("train", *words)
    config = json.loads((path / "finished" / "config.json").read_text())
    others = {
        "begun": {},
        "verified": {"command": "verify"},
        "compared": {"command": "compare", "strategies": ["single", "manual"]},
        "older": {"format": None},
    }
    for name, changes in others.items():
        (path / name).mkdir()
        (path / name / "config.json").write_text(json.dumps({**config, **changes}))
    (path / "compared" / "compare.json").write_text("{}")
    for name in ("damaged", "truncated", "edited"):
        shutil.copytree(path / "finished", path / name)
    (damaged,) = (path / "damaged").rglob("*.safetensors")
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"\x01")
    (path / "truncated" / "summary.json").write_text("")
    summary = json.loads((path / "edited" / "summary.json").read_text())
    (path / "edited" / "summary.json").write_text(json.dumps({**summary, "devices": -1.5}))
