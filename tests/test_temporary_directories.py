"""Temporary directories: what a killed process leaves is removed, what a living one has is not."""

import contextlib
import os
import pathlib
import signal
import subprocess
import sys
import tempfile

import pytest

from app.runtime import temporary_directories
from app.runtime.errors import DiskFullError
from app.runtime.temporary_directories import TemporaryDirectory, remove_stale_directories
from conftest import ROOT

SCRIPT = """
import sys
from app.runtime.temporary_directories import TemporaryDirectory
directory = TemporaryDirectory()
open(f"{directory.name}/generated.so", "w").close()
print(directory.name, flush=True)
sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def _own_place(tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(temporary_directories, "_MIN_AGE_SEC", 0)


@contextlib.contextmanager
def process():
    """Starts a process that has a directory; yields both, once the directory is there."""
    with subprocess.Popen(
        [sys.executable, "-c", SCRIPT],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT,
    ) as child:  # fmt: skip
        try:
            yield child, pathlib.Path(child.stdout.readline().strip())
        finally:
            child.kill()


def test_the_next_process_removes_what_a_killed_one_has_left(tmp_path):
    with process() as (child, left):
        child.kill()
        child.wait()
        assert (left / "generated.so").exists()
        with TemporaryDirectory() as own:
            assert [str(path) for path in tmp_path.iterdir()] == [own]
    assert list(tmp_path.iterdir()) == []


def test_the_directory_of_a_living_process_stays():
    with process() as (child, used), TemporaryDirectory():
        child.send_signal(signal.SIGSTOP)
        remove_stale_directories(used.parent)
        assert (used / "generated.so").exists()


def test_other_directories_links_and_those_of_other_users_stay(tmp_path, monkeypatch):
    names = {"lockstep-first", "lockstep-tmp-file", "lockstep-tmp-link", "elsewhere"}
    (tmp_path / "lockstep-first").mkdir()  # A run, as `doctor` advises.
    (tmp_path / "lockstep-tmp-file").touch()
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "lockstep-tmp-link").symlink_to("elsewhere")
    remove_stale_directories(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == names
    (tmp_path / "lockstep-tmp-other").mkdir()
    another = os.geteuid() + 1
    monkeypatch.setattr(os, "geteuid", lambda: another)
    remove_stale_directories(tmp_path)
    assert (tmp_path / "lockstep-tmp-other").exists()


def test_no_place_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "missing"))
    with pytest.raises(DiskFullError, match="set TMPDIR to another directory"):
        TemporaryDirectory()
