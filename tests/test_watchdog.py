"""The watchdog: silent while something moves, and certain when nothing does."""

import os
import signal
import subprocess
import sys
import threading
import time

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


def test_zero_watches_nothing():
    with watchdog.watch(0, lambda: None) as on_progress:
        on_progress()
        assert "watchdog" not in [thread.name for thread in threading.enumerate()]
    with watchdog.watch(9, lambda: None):
        assert "watchdog" in [thread.name for thread in threading.enumerate()]
