"""Temporary directories: what a killed process leaves is removed, what a living one has is not."""

import contextlib
import multiprocessing
import os
import pathlib
import signal
import subprocess
import sys
import tempfile

import pytest

from app.runtime.errors import DiskFullError
from app.runtime.temporary_directories import TemporaryDirectory, hold, remove_stale_directories
from conftest import ROOT

CREATE = (
    "import sys\n"
    "from app.runtime.temporary_directories import TemporaryDirectory\n"
    "directory = TemporaryDirectory()\n"
    "open(f'{directory.name}/generated.so', 'w').close()\n"
)
WAIT = "print(directory.name, flush=True)\nsys.stdin.read()\n"


@pytest.fixture(autouse=True)
def _own_place(tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


@contextlib.contextmanager
def process(script=CREATE + WAIT):
    """Starts a process that has a directory; yields both, once the directory is there."""
    with subprocess.Popen(
        [sys.executable, "-c", script],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT,
    ) as child:  # fmt: skip
        try:
            yield child, pathlib.Path(child.stdout.readline().strip())
        finally:
            child.kill()


def kill(child):
    child.send_signal(signal.SIGKILL)
    child.wait()


def test_the_next_process_removes_what_a_killed_one_has_left(tmp_path):
    with process() as (child, left):
        kill(child)
        assert (left / "generated.so").exists()
        with TemporaryDirectory() as own:
            assert [str(path) for path in tmp_path.iterdir()] == [own]
    assert list(tmp_path.iterdir()) == []


def test_the_directory_of_a_living_process_stays():
    with process() as (child, used), TemporaryDirectory():
        assert (used / "generated.so").exists()
        child.send_signal(signal.SIGSTOP)
        remove_stale_directories(used.parent)
        assert (used / "generated.so").exists()


def test_a_directory_stays_while_a_process_lives_that_has_its_own_in_it(tmp_path):
    with process() as (child, outer):
        kill(child)
        place = f"import tempfile\ntempfile.tempdir = {str(outer)!r}\n"
        with process(place + CREATE + WAIT) as (inner_child, inner):
            assert inner.parent == outer
            remove_stale_directories(tmp_path)
            assert inner.exists() and outer.exists()
            kill(inner_child)
            remove_stale_directories(tmp_path)
            assert not outer.exists()


def test_a_process_can_hold_the_directory_of_another_one(tmp_path):
    with process() as (child, left):
        holder = multiprocessing.get_context("fork").Process(target=_hold_and_wait, args=[left])
        holder.start()
        kill(child)
        while not (left / "held").exists():
            assert holder.is_alive()
        remove_stale_directories(tmp_path)
        assert left.exists()
        holder.kill()
        holder.join()
        remove_stale_directories(tmp_path)
        assert not left.exists()


def _hold_and_wait(path):
    hold(str(path))
    (path / "held").touch()
    signal.pause()


def test_many_that_start_at_once_disturb_nobody(tmp_path):
    for _ in range(3):
        with process() as (child, _left):
            kill(child)
    with contextlib.ExitStack() as stack:
        started = [stack.enter_context(process()) for _ in range(4)]
        expected = {path for _, path in started}
        assert set(tmp_path.iterdir()) == expected
        assert all((path / "generated.so").exists() for path in expected)


def test_other_directories_and_links_stay(tmp_path):
    (tmp_path / "lockstep-first").mkdir()  # A run, as `doctor` advises.
    (tmp_path / "lockstep-first" / ".lock").touch()
    (tmp_path / "lockstep-file").touch()
    with process() as (child, left):
        kill(child)
        elsewhere = left.rename(tmp_path / "elsewhere")
        (tmp_path / "lockstep-link").symlink_to(elsewhere)
        remove_stale_directories(tmp_path)
        names = {"lockstep-first", "lockstep-file", "elsewhere", "lockstep-link"}
        assert {path.name for path in tmp_path.iterdir()} == names
        assert (elsewhere / "generated.so").exists()


def test_the_directory_of_another_user_is_left_alone(tmp_path, monkeypatch, capsys):
    with process() as (child, left):
        kill(child)
        another = os.geteuid() + 1
        monkeypatch.setattr(os, "geteuid", lambda: another)
        remove_stale_directories(tmp_path)
        assert left.exists() and capsys.readouterr() == ("", "")


def test_no_place_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "missing"))
    with pytest.raises(DiskFullError, match="set TMPDIR to another directory"):
        TemporaryDirectory()


def test_cleanup_may_be_called_again(tmp_path):
    directory = TemporaryDirectory()
    directory.cleanup()
    directory.cleanup()
    assert list(tmp_path.iterdir()) == []
