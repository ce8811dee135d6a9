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
    """Stopped for longer than the timer of the kernel."""
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
_HANG = """
import ctypes
from app.runtime import run_context
libc, mutex = ctypes.PyDLL(None), ctypes.create_string_buffer(64)
with run_context.RunContext() as context:
    with watchdog.watch(4, lambda: None):
        context.log_file = {log_file}
        time.sleep(1)
        [libc.pthread_mutex_lock(mutex) for _ in range(2)]
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the timer is Linux's")
@pytest.mark.parametrize("has_log", [False, True], ids=["no log", "log"])
def test_it_ends_a_process_in_which_no_python_code_can_run(has_log, tmp_path):
    log = tmp_path / "log.txt"
    log.touch()
    log_file = repr(str(log)) if has_log else None
    process = run(_HANG.format(log_file=log_file), stderr=subprocess.PIPE)
    start = time.monotonic()
    _, errors = process.communicate(timeout=30)
    assert process.returncode == -signal.SIGALRM and time.monotonic() - start < 15
    stacks = log.read_text() if has_log else errors.decode()
    assert 'File "<string>", line 10 in' in stacks and "watchdog.py" in stacks
    assert not (has_log and errors)


def test_zero_watches_nothing():
    with watchdog.watch(0, lambda: None) as on_progress:
        on_progress()
        assert "watchdog" not in [thread.name for thread in threading.enumerate()]
    with watchdog.watch(9, lambda: None):
        assert "watchdog" in [thread.name for thread in threading.enumerate()]
