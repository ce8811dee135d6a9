"""Tests the state of a command: visible to its functions, and restored afterwards."""

import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import threading
import time

import pytest

from app.runtime import console, run_context, signals
from app.runtime.errors import DiskFullError, Terminated
from app.runtime.run_context import RunContext
from conftest import ROOT


def raise_signal(number):
    os.kill(os.getpid(), number)
    time.sleep(1)  # Python's handler runs in here.


def test_environment_and_temporary_files_are_as_before(monkeypatch, tmp_path):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setenv("CHANGED", "before")
    monkeypatch.setenv("REMOVED", "before")
    before = dict(os.environ)
    with RunContext() as context:
        context.use_temporary_directory()
        context.use_temporary_directory()  # Once is enough.
        (own,) = tmp_path.iterdir()
        assert tempfile.gettempdir() == os.environ["TMPDIR"] == str(own)
        (own / "generated.py").touch()
        os.environ.update(CHANGED="after", ADDED="after")
        del os.environ["REMOVED"]
    assert dict(os.environ) == before and tempfile.tempdir is None
    assert list(tmp_path.iterdir()) == []


def test_a_context_without_room_is_left_as_it_was_entered(monkeypatch, tmp_path):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "missing"))
    with pytest.raises(DiskFullError), RunContext() as context:
        context.use_temporary_directory()
    assert tempfile.tempdir == str(tmp_path / "missing") and run_context.current() is None


def test_each_command_has_a_log_of_its_own(tmp_path, capsys):
    for name in ("first", "second"):
        with RunContext():
            console.open_log(tmp_path / name)
            console.say(f"a line of {name}")
            console.warn(f"a warning of {name}")
    console.say("outside")
    for name in ("first", "second"):
        lines = (tmp_path / name).read_text().splitlines()
        assert [line.split(maxsplit=2)[2] for line in lines] == [
            f"INFO a line of {name}",
            f"WARNING a warning of {name}",
        ]
    assert capsys.readouterr().out.splitlines()[-1] == "outside"


def test_a_log_closes_its_file(tmp_path):
    def descriptors():
        return sorted(os.readlink(path) for path in pathlib.Path("/proc/self/fd").iterdir()
                      if path.exists())  # fmt: skip

    with RunContext():
        console.open_log(tmp_path / "log.txt")
        assert str(tmp_path / "log.txt") in descriptors()
    assert str(tmp_path / "log.txt") not in descriptors()


def test_outside_of_a_command_there_is_nothing_to_set():
    assert run_context.current() is None and signals.requested() == 0
    with pytest.raises(RuntimeError, match="enter a RunContext"):
        console.set_overwriting(True)
    signals.check()


def test_forwarded_warnings_are_those_of_one_command(capsys):
    warnings = []
    with RunContext():
        console.forward_warnings(warnings.append)
        console.warn("to another process")
    with RunContext():
        console.warn("printed")
    assert warnings == ["to another process"]
    assert capsys.readouterr().err == "WARNING: printed\n"


def test_threads_have_the_context_of_the_command():
    with RunContext() as context:
        seen = []
        run_context.start_thread(lambda: seen.append(run_context.current())).join()
        assert seen == [context]


@pytest.mark.parametrize(
    ("number", "raised"),
    [
        (signal.SIGINT, KeyboardInterrupt),
        (signal.SIGTERM, Terminated),
        (signals.STOP_REQUEST, Terminated),
        (signal.SIGHUP, Terminated),
    ],
)
def test_a_deferred_signal_is_that_of_one_command(number, raised):
    numbers = (signal.SIGINT, signal.SIGTERM, signals.STOP_REQUEST, signal.SIGHUP)
    before = [signal.getsignal(n) for n in numbers], threading.enumerate()
    told = []
    with RunContext(), signals.handled(), signals.deferred(lambda: told.append(number)):
        signals.check()
        raise_signal(number)
        assert signals.requested() == number and told == [number]
        with pytest.raises(raised):
            signals.check()
    with RunContext(), signals.handled():
        assert signals.requested() == 0
    assert ([signal.getsignal(n) for n in numbers], threading.enumerate()) == before


@pytest.mark.parametrize(
    ("number", "code"),
    [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signals.STOP_REQUEST, 143)],
)
def test_elsewhere_a_signal_ends_the_process_also_in_native_code(number, code):
    script = (
        "import signal; signal.signal(2, signal.SIG_DFL)\n"
        "from app.runtime import signals; from app.runtime.run_context import RunContext\n"
        "import ctypes\nwith RunContext(), signals.handled():\n"
        " print('up', flush=True)\n while True: ctypes.CDLL(None).sleep(60)"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", script],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT,
    )  # fmt: skip
    try:
        assert process.stdout.readline() == "up\n"
        process.send_signal(number)
        _, errors = process.communicate(timeout=20)
    finally:
        process.kill()
    assert process.returncode == code
    assert errors.splitlines()[-1].endswith("no state is saved yet; run the same command again")


def test_ignored_signals_stay_ignored():
    """As a shell starts jobs in the background."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with RunContext(), signals.handled():
            raise_signal(signal.SIGINT)
            assert signals.requested() == 0
    finally:
        signal.signal(signal.SIGINT, before)


def test_what_is_left_to_do_is_done_backwards_and_within_the_command():
    seen = []
    with RunContext() as context:
        for number in (1, 2):
            context.at_end(lambda number: seen.append((number, run_context.current())), number)
    assert seen == [(2, context), (1, context)]
