"""The state of a command: its log, signals, watchdog and bar, and their end."""

import contextlib
import os
import pathlib
import signal
import subprocess
import sys
import threading
import time
import types

import pytest

from app.runtime import console, progress_bar, run_context, signals, watchdog
from app.runtime.errors import Terminated
from app.runtime.progress_bar import TrainingProgress, duration_text
from app.runtime.run_context import RunContext
from conftest import ROOT
from strategies.base import StepTotals


@contextlib.contextmanager
def python(body):
    """Runs a script without TensorFlow; yields its process once it has printed "up"."""
    head = (
        "import signal, sys, time\nsignal.signal(signal.SIGINT, signal.SIG_DFL)\n"
        "from app.runtime import run_context, signals, watchdog\n"
        "up = lambda *told: print('up', *told, flush=True)\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", head + body], cwd=ROOT, text=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    with process:
        try:
            line = process.stdout.readline()
            assert line.startswith("up"), process.stderr.read()
            yield process, line[3:].strip()
        finally:
            process.kill()


def test_each_command_has_a_log_and_warnings_of_its_own(tmp_path, capsys):
    def descriptors():
        paths = pathlib.Path("/proc/self/fd").iterdir()
        return [os.readlink(path) for path in paths if path.exists()]

    forwarded = []
    for name in ("first", "second"):
        with RunContext():
            if name == "first":
                console.forward_warnings(forwarded.append)
            console.open_log(tmp_path / name)
            console.say(f"a line of {name}")
            console.warn(f"a warning of {name}")
            assert str(tmp_path / name) in descriptors()
        assert str(tmp_path / name) not in descriptors()
    console.say("outside")
    for name, lines in (("first", ["INFO"]), ("second", ["INFO", "WARNING"])):
        found = [line.split()[2] for line in (tmp_path / name).read_text().splitlines()]
        assert found[: len(lines)] == lines and name in (tmp_path / name).read_text()
    assert forwarded == ["a warning of first"]
    printed = capsys.readouterr()
    assert printed.err == "WARNING: a warning of second\n"
    assert printed.out.splitlines()[-1] == "outside"


def test_outside_of_a_command_there_is_nothing_to_set():
    assert run_context.current() is None and signals.requested() == 0
    with pytest.raises(RuntimeError, match="enter a RunContext"):
        console.set_overwriting(True)
    signals.check()


def test_threads_have_the_context_of_the_command_and_its_end_is_in_reverse_order():
    seen = []
    with RunContext() as context:
        run_context.start_thread(lambda: seen.append(run_context.current())).join()
        for number in (1, 2):
            context.at_end(lambda number: seen.append((number, run_context.current())), number)
    assert seen == [context, (2, context), (1, context)]


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
    told, is_told = [], threading.Event()

    def tell():
        told.append(number)
        is_told.set()

    with RunContext(), signals.handled(), signals.deferred(tell):
        signals.check()
        os.kill(os.getpid(), number)
        assert is_told.wait(20) and signals.requested() == number and told == [number]
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
    body = (
        "import ctypes\nwith run_context.RunContext(), signals.handled():\n"
        " up()\n while True: ctypes.CDLL(None).sleep(60)"
    )
    with python(body) as (process, _):
        process.send_signal(number)
        _, errors = process.communicate(timeout=20)
    assert process.returncode == code
    assert errors.splitlines()[-1].endswith("no state is saved yet; run the same command again")


def test_a_second_signal_ends_a_command_that_does_not_reach_its_next_check():
    body = (
        "with run_context.RunContext(), signals.handled():\n"
        " with signals.deferred(lambda: print('first', flush=True)):\n"
        "  up()\n  time.sleep(60)"
    )
    with python(body) as (process, _):
        process.send_signal(signal.SIGTERM)
        assert process.stdout.readline() == "first\n"
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=20)
    assert process.returncode == 130
    assert errors == "a second SIGINT: exiting now; the last checkpoint is kept\n"


def test_ignored_signals_stay_ignored():
    """As a shell starts jobs in the background."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with RunContext(), signals.handled():
            assert signal.getsignal(signal.SIGINT) == signal.SIG_IGN
            os.kill(os.getpid(), signal.SIGINT)
            assert signals.requested() == 0
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("report", ["print('told', flush=True)", "time.sleep(60)"])
def test_the_watchdog_ends_a_process_in_which_nothing_moves(report):
    body = (
        "watchdog._REPORT_SEC = 0.1\nup()\n"
        f"with watchdog.watch(2, lambda: {report}):\n time.sleep(60)"
    )
    with python(body) as (process, _):
        output, _ = process.communicate(timeout=30)
    assert process.returncode == 138 and output == ("told\n" if "told" in report else "")


def test_a_process_that_was_stopped_has_not_stalled():
    """Stopped for longer than the timer of the kernel."""
    body = (
        "with watchdog.watch(2, lambda: None) as on_progress:\n up()\n"
        " [(time.sleep(0.1), on_progress()) for _ in range(10)]\nsys.exit(0)"
    )
    with python(body) as (process, _):
        process.send_signal(signal.SIGSTOP)
        time.sleep(3)
        process.send_signal(signal.SIGCONT)
        assert process.wait(20) == 0


# Native code that waits for a lock that it has, and holds Python's global lock.
HANG = """
import ctypes
libc, mutex = ctypes.PyDLL(None), ctypes.create_string_buffer(64)
with run_context.RunContext() as context:
    with watchdog.watch(4, lambda: None):
        context.log_file = {log_file}
        time.sleep(1)
        up()
        [libc.pthread_mutex_lock(mutex) for _ in range(2)]
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the timer is Linux's")
@pytest.mark.parametrize("has_log", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_it_ends_a_process_in_which_no_python_code_can_run(has_log, tmp_path):
    log = tmp_path / "log.txt"
    log.touch()
    with python(HANG.format(log_file=repr(str(log)) if has_log else None)) as (process, _):
        _, errors = process.communicate(timeout=30)
    assert process.returncode == -signal.SIGALRM
    stacks = log.read_text() if has_log else errors
    assert 'File "<string>", line 13 in' in stacks and "watchdog.py" in stacks
    assert not (has_log and errors)


def test_a_limit_of_zero_watches_nothing():
    for sec in (0, 9):
        with watchdog.watch(sec, lambda: None) as on_progress:
            on_progress()
            assert ("watchdog" in [t.name for t in threading.enumerate()]) == bool(sec)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.4, "0 s"), (99, "99 s"), (100, "2 min"), (3 * 3600 + 300, "3 h 05 min"),
     (52 * 3600, "2 d 4 h")],
)  # fmt: skip
def test_a_duration_has_one_or_two_units(seconds, text):
    assert duration_text(seconds) == text


def test_a_long_training_prints_its_duration_once_steps_after_the_warm_up_are_measured(
    monkeypatch, capsys
):
    """Steps 1 and 2 take 16 s and 10 s, because they compile; the others take 2 s each."""
    now = [0.0]
    monkeypatch.setattr(progress_bar, "time", types.SimpleNamespace(monotonic=lambda: now[0]))
    with TrainingProgress(10, 100) as progress:
        for step, seconds in enumerate((16, 10, 2, 2, 2), start=1):
            now[0] += seconds
            progress.step(step, StepTotals(2.0, 1, 2), 100.0)
    first, second = capsys.readouterr().out.splitlines()
    assert first == "epoch 1/10  loss 1.000  accuracy 0.500  step 1/1000"
    assert second == (
        "epoch 1/10  loss 1.000  accuracy 0.500  100 images/s  step 5/1000, 33 min left"
    )
