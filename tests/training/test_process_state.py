"""The state of a process: its log, signals, the limit of a stall, and memory."""

import contextlib
import errno
import os
import signal
import subprocess
import sys
import time

import pytest
import tensorflow as tf

from app import console, signals
from app.errors import DiskFullError, Terminated, expected_error, memory_error
from tests.conftest import ROOT
from tests.in_process import close_log

NUMBERS = signal.SIGINT, signal.SIGTERM, signals.STOP_REQUEST, signal.SIGHUP


@pytest.fixture(autouse=True)
def _restored():
    """A process runs one command; these tests are several."""
    close_log()
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
    assert (*capsys.readouterr(),) == ("before\na line\n", "WARNING: a warning\n")


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


def test_elsewhere_a_signal_is_raised_at_once_and_ignored_ones_stay_ignored():
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # As a shell starts jobs in the background.
    signals.install()
    os.kill(os.getpid(), signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) == signal.SIG_IGN and signals.requested() == 0
    with pytest.raises(Terminated), signals.deferred(signals.check):
        os.kill(os.getpid(), signals.STOP_REQUEST)
        time.sleep(60)


@contextlib.contextmanager
def python(body, *arguments):
    """Runs a script without TensorFlow; yields its process once it has called `up`."""
    head = (
        "import signal, sys, time\nsignal.signal(signal.SIGINT, signal.SIG_DFL)\n"
        "from app import console, errors, signals\nup = lambda: print('up', flush=True)\n"
        "stalled = errors.StalledError('no progress; run it again')\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", head + body, *arguments], cwd=ROOT, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    ) as process:  # fmt: skip
        try:
            assert process.stdout.readline() == "up\n", process.stderr.read()
            yield process
        finally:
            process.kill()


STALL = """
with signals.stall_limit(1.5, stalled) as on_progress:
    up()
    [(time.sleep(0.1), on_progress()) for _ in range(10)]
    print("moved", flush=True)
    time.sleep(60)
"""


def test_a_process_in_which_nothing_moves_is_ended_but_not_one_that_was_stopped():
    """Stopped for longer than the limit."""
    with python(STALL) as process:
        process.send_signal(signal.SIGSTOP)
        time.sleep(2.5)
        process.send_signal(signal.SIGCONT)
        printed, errors = process.communicate(timeout=30)
    assert (process.returncode, printed) == (142, "moved\n")
    assert "error: no progress; run it again" in errors.splitlines() and ", line " in errors


# Native code that waits for a lock that it has, and holds Python's global lock.
HANG = """
import ctypes
libc, mutex = ctypes.PyDLL(None), ctypes.create_string_buffer(64)
signals._GRACE_SEC = 2
console.open_log(sys.argv[1])
with signals.stall_limit(1, stalled):
    up()
    [libc.pthread_mutex_lock(mutex) for _ in range(2)]
"""


@pytest.mark.skipif(sys.platform != "linux", reason="its locks are Linux's")
def test_a_process_in_which_no_python_code_can_run_is_ended(tmp_path):
    with python(HANG, tmp_path / "log.txt") as process:
        assert process.communicate(timeout=30)[1] == ""
    assert process.returncode == -signal.SIGALRM
    assert 'File "<string>"' in (tmp_path / "log.txt").read_text()


def test_what_says_that_memory_ran_out_and_what_that_a_disk_is_full():
    """TensorFlow has one class for both, and raises another one while it traces a function."""
    full = DiskFullError("f: No space left on device; make room")
    full.__cause__ = tf.errors.ResourceExhaustedError(None, None, "f; No space left on device")
    threads = RuntimeError("can't start new thread")
    of_memory = [
        MemoryError(), tf.errors.ResourceExhaustedError(None, None, "OOM"), threads,
        OSError(errno.ENOMEM, "Cannot allocate memory"),
    ]  # fmt: skip
    for error in (*of_memory, RuntimeError("OOM"), full):
        assert (memory_error(error) is not None) == (error in of_memory), error

    def fail():
        raise threads

    with pytest.raises(Exception, match="in user code") as caught:
        tf.function(fail)()
    assert str(expected_error(caught.value)).startswith("out of memory (")
