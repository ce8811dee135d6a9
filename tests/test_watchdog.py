"""The watchdog: silent while something moves, and certain when nothing does."""

import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from app.runtime import watchdog
from conftest import ROOT


def run(body, **options):
    script = f"import sys, time; from app.runtime import watchdog\n{body}"
    return subprocess.Popen([sys.executable, "-c", script], cwd=ROOT, **options)


def test_it_ends_the_process_when_nothing_moves():
    process = run(
        "with watchdog.watch(1, lambda: print('told', flush=True)):\n time.sleep(60)",
        stdout=subprocess.PIPE,
    )
    output, _ = process.communicate(timeout=20)
    assert process.returncode == 138 and output == b"told\n"


def test_a_report_that_hangs_does_not_keep_it():
    process = run(
        "watchdog._REPORT_SEC = 0.1\n"
        "with watchdog.watch(1, lambda: time.sleep(60)):\n time.sleep(60)"
    )
    assert process.wait(20) == 138


def test_a_process_that_was_stopped_has_not_stalled():
    process = run(
        "with watchdog.watch(2, lambda: None) as on_progress:\n print('up', flush=True)\n"
        " [(time.sleep(0.1), on_progress()) for _ in range(10)]\nsys.exit(0)",
        stdout=subprocess.PIPE,
    )
    assert process.stdout.readline() == b"up\n"
    os.kill(process.pid, signal.SIGSTOP)
    time.sleep(3)
    os.kill(process.pid, signal.SIGCONT)
    assert process.wait(20) == 0
    process.stdout.close()


# Native code that waits for a lock that it has, and holds Python's global lock.
_HANG = (
    "import ctypes; libc, mutex = ctypes.PyDLL(None), ctypes.create_string_buffer(64)\n"
    "from app.runtime import kernel_timer, run_context; kernel_timer._GRACE_SEC = 1\n"
    "with run_context.RunContext() as context:\n"
    " with watchdog.watch(2, lambda: None):\n"
    "  time.sleep(0.7); {change}; time.sleep(0.7)\n"
    "  [libc.pthread_mutex_lock(mutex) for _ in range(2)]"
)


@pytest.mark.skipif(sys.platform != "linux", reason="the timer is Linux's")
@pytest.mark.parametrize("has_log", [False, True], ids=["no log", "log"])
def test_it_ends_a_process_in_which_no_python_code_can_run(has_log, tmp_path):
    log = tmp_path / "log.txt"
    log.touch()
    change = f"context.log_file = {str(log)!r}" if has_log else "pass"
    process = run(_HANG.format(change=change), stderr=subprocess.PIPE)
    _, errors = process.communicate(timeout=20)
    assert process.returncode == -signal.SIGVTALRM
    stacks = log.read_text() if has_log else errors.decode()
    assert 'File "<string>", line 7 in' in stacks
    assert "watchdog.py" in stacks
    assert not (has_log and errors)


@pytest.mark.skipif(sys.platform != "linux", reason="the timer is Linux's")
def test_a_timer_that_is_restarted_never_ends_a_process():
    """Its signals come here from outside, as after a suspension."""
    process = run(
        "with watchdog.watch(60, lambda: None):\n print('up', flush=True)\n time.sleep(4)\n"
        "import signal; assert signal.getsignal(signal.SIGVTALRM) == signal.SIG_DFL\n"
        "signal.raise_signal(signal.SIGVTALRM)",
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdout.readline() == b"up\n"
    for _ in range(2):
        time.sleep(1.2)
        process.send_signal(signal.SIGVTALRM)
    _, errors = process.communicate(timeout=20)
    assert process.returncode == -signal.SIGVTALRM  # At the end, by its own.
    assert errors.count(b"most recent call first") == 2 * 2  # Threads, signals.


def test_zero_watches_nothing():
    with watchdog.watch(0, lambda: None) as on_progress:
        on_progress()
        assert "watchdog" not in [thread.name for thread in threading.enumerate()]
    with watchdog.watch(9, lambda: None):
        assert "watchdog" in [thread.name for thread in threading.enumerate()]
