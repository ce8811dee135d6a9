"""Tests the state of a command: visible to its functions, and restored afterwards."""

import contextlib
import os
import pathlib
import signal
import socket
import sys
import tempfile
import threading
import time

import pytest

from app.devices import device_setup
from app.runtime import console, run_context, signals, temporary_directories
from app.runtime.errors import DiskFullError, Terminated
from app.runtime.run_context import RunContext


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


def test_a_signal_while_the_directory_is_created_leaves_none(monkeypatch, tmp_path):
    def create(directory):
        raise_signal(signal.SIGTERM)
        return original(directory)

    original = temporary_directories._create_owner_file
    monkeypatch.setattr(temporary_directories, "_create_owner_file", create)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with pytest.raises(Terminated), RunContext(), signals.handled():
        device_setup.import_tensorflow(-1)
    assert list(tmp_path.iterdir()) == []


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
    with signals.deferred():
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
def test_a_signal_is_that_of_one_command(number, raised):
    numbers = (signal.SIGINT, signal.SIGTERM, signals.STOP_REQUEST, signal.SIGHUP)
    ours, theirs = socket.socketpair()
    theirs.setblocking(False)
    with ours, theirs:
        before_fd = signal.set_wakeup_fd(theirs.fileno())
        try:
            before = [signal.getsignal(n) for n in numbers], threading.enumerate()
            with pytest.raises(raised), RunContext(), signals.handled():
                assert "signals" in [thread.name for thread in threading.enumerate()]
                raise_signal(number)
            with RunContext(), signals.handled():
                assert signals.requested() == 0
                signals.check()
                with signals.deferred():
                    raise_signal(number)
                    assert signals.requested() == number
                    with pytest.raises(raised):
                        signals.check()
            assert ([signal.getsignal(n) for n in numbers], threading.enumerate()) == before
            assert signal.set_wakeup_fd(-1) == theirs.fileno()
        finally:
            signal.set_wakeup_fd(before_fd)


@contextlib.contextmanager
def nested():
    """Fails when it is left by an exception, as the stacks of TensorFlow's graphs do."""
    try:
        yield
    finally:
        raise AssertionError("Nesting violated")


@contextlib.contextmanager
def native():
    """Raises an error of its own in place of an exception, as native code does."""
    try:
        yield
    except BaseException:
        failed = True
    else:
        failed = False
    if failed:
        raise RuntimeError("in user code:")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interruption_that_becomes_another_error_on_its_way_is_raised_itself(number):
    raised = KeyboardInterrupt if number == signal.SIGINT else Terminated
    for replacing in (nested, native):
        with (
            RunContext(),
            signals.handled(),
            pytest.raises(raised),
            signals.unmasked(),
            replacing(),
        ):
            raise_signal(number)
    with (
        RunContext(),
        signals.handled(),
        pytest.raises(AssertionError),
        signals.unmasked(),
        nested(),
    ):
        pass  # Without an interruption it is an error.


class Interrupted:
    """Receives a signal while its destructor runs, which cannot raise."""

    def __del__(self):
        raise_signal(signal.SIGTERM)


def test_an_interruption_within_a_destructor_is_raised_after_it(capsys):
    before = sys.unraisablehook, signal.getsignal(signal.SIGALRM)
    with RunContext(), signals.handled(), pytest.raises(Terminated):
        Interrupted()
        time.sleep(10)
        pytest.fail("it was dropped")
    assert capsys.readouterr().err == ""
    assert (sys.unraisablehook, signal.getsignal(signal.SIGALRM)) == before


def test_signals_before_and_after_a_command_do_not_raise_there():
    with RunContext(), signals.deferred(), signals.handled():
        raise_signal(signal.SIGTERM)
        with pytest.raises(Terminated), signals.raised():
            pytest.fail("the command must not start")
    with RunContext(), signals.deferred(), signals.handled():
        with signals.raised():
            pass
        raise_signal(signal.SIGTERM)


def test_an_error_while_a_deferred_interruption_is_handled_is_an_error():
    @signals.deferred()
    def fail():
        try:
            raise_signal(signal.SIGTERM)
            signals.check()
        except Terminated:
            raise OSError("the state cannot be saved") from None

    with RunContext(), signals.handled(), pytest.raises(OSError), signals.unmasked():
        fail()


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
