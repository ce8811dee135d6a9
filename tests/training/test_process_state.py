"""The state of a process: its log, signals, and the limit of a stall."""

import contextlib
import os
import signal
import subprocess
import sys
import time

import pytest

from app import console, signals
from app.errors import Terminated
from tests.conftest import ROOT
from tests.in_process import close_log

NUMBERS = signal.SIGINT, signal.SIGTERM, signals.STOP_REQUEST, signal.SIGHUP


@contextlib.contextmanager
def python(body, *arguments):
    """Runs a script without TensorFlow; yields its process once it has called `up`."""
    head = (
        "import signal, sys, time\nsignal.signal(signal.SIGINT, signal.SIG_DFL)\n"
        "from app import console, errors, signals\nup = lambda: print('up', flush=True)\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", head + body, *arguments], cwd=ROOT, text=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    with process:
        try:
            assert process.stdout.readline() == "up\n", process.stderr.read()
            yield process
        finally:
            process.kill()


def end(process):
    """Waits for the end; returns the exit code and what is on standard error."""
    errors = process.communicate(timeout=30)[1]
    return process.returncode, errors


@pytest.fixture(autouse=True)
def _restored():
    """A process runs one command; these tests are several."""
    before = [(number, signal.getsignal(number)) for number in NUMBERS]
    yield
    close_log()
    for number, handler in before:
        signal.signal(number, handler)


def test_a_log_has_what_was_printed_and_warnings_can_be_forwarded(tmp_path, capsys):
    console.say("before")
    console.open_log(tmp_path / "log.txt")
    console.say("a line")
    console.warn("a warning")
    forwarded = []
    console.forward_warnings(forwarded.append)
    console.warn("another warning")
    found = [line.split(maxsplit=3)[2:] for line in console.log_file().read_text().splitlines()]
    assert found == [["INFO", "a line"], ["WARNING", "a warning"], ["WARNING", "another warning"]]
    assert forwarded == ["another warning"]
    told, warned = capsys.readouterr()
    assert told == "before\na line\n" and warned == "WARNING: a warning\n"


def test_a_deferred_signal_is_raised_when_it_is_checked():
    signals.check()  # Without a handler, none was received.
    for number in NUMBERS:
        signals.install()
        told = []
        with signals.deferred(lambda number=number, told=told: told.append(number)):
            signals.check()
            os.kill(os.getpid(), number)
            assert signals.requested() == number and told == [number]
            with pytest.raises((KeyboardInterrupt, Terminated)) as stop:
                signals.check()
            code = 130 if number == signal.SIGINT else 143
            assert console.report_interruption(stop.value) == code


def test_elsewhere_a_signal_is_raised_at_once():
    body = (
        "signals.install()\ntry:\n with signals.deferred(signals.check):\n"
        "  up()\n  time.sleep(60)\n"
        "except BaseException as stop:\n sys.exit(console.report_interruption(stop))"
    )
    with python(body) as process:
        process.send_signal(signals.STOP_REQUEST)
        told = "terminated; no state is saved yet; run the same command again\n"
        assert end(process) == (143, told)


def test_ignored_signals_stay_ignored():
    """As a shell starts jobs in the background."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signals.install()
    assert signal.getsignal(signal.SIGINT) == signal.SIG_IGN
    os.kill(os.getpid(), signal.SIGINT)
    assert signals.requested() == 0


STALLED = "errors.StalledError('no progress; run it again')"


@pytest.mark.parametrize("has_log", [True, False])
def test_a_process_in_which_nothing_moves_is_ended(has_log, tmp_path):
    log = tmp_path / "log.txt"
    body = f"console.open_log({str(log)!r})\n" if has_log else ""
    body += f"up()\nwith signals.stall_limit(1, {STALLED}):\n time.sleep(60)"
    with python(body) as process:
        code, errors = end(process)
    assert code == 142 and "error: no progress; run it again" in errors.splitlines()
    assert ", line " in (log.read_text() if has_log else errors)


def test_a_process_that_was_stopped_has_not_stalled():
    """Stopped for longer than the limit."""
    body = (
        f"with signals.stall_limit(2, {STALLED}) as on_progress:\n up()\n"
        " [(time.sleep(0.1), on_progress()) for _ in range(10)]\nsys.exit(0)"
    )
    with python(body) as process:
        process.send_signal(signal.SIGSTOP)
        time.sleep(3)
        process.send_signal(signal.SIGCONT)
        assert process.wait(20) == 0


# Native code that waits for a lock that it has, and holds Python's global lock.
HANG = f"""
import ctypes
libc, mutex = ctypes.PyDLL(None), ctypes.create_string_buffer(64)
signals._GRACE_SEC = 2
console.open_log(sys.argv[1])
with signals.stall_limit(1, {STALLED}):
    up()
    [libc.pthread_mutex_lock(mutex) for _ in range(2)]
"""


@pytest.mark.skipif(sys.platform != "linux", reason="its locks are Linux's")
def test_a_process_in_which_no_python_code_can_run_is_ended(tmp_path):
    log = tmp_path / "log.txt"
    with python(HANG, log) as process:
        assert end(process) == (-signal.SIGALRM, "")
    assert 'File "<string>"' in log.read_text()
