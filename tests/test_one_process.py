"""Tests several commands in one process: none sees or keeps the state of another."""

import logging
import os
import signal
import tempfile
import threading

import pytest

from app.records.history import load_summary
from conftest import run_ok
from failing_steps import after_step
from in_process import run_here

TRAINING = (
    "--device=cpu", "--num_devices=2", "--num_train_examples=200", "--epochs=2",
    "--global_batch_size=20", "--allow_unverified_data",
)  # fmt: skip
NUMBERS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)


def state_of_process():
    """Returns all state that a command could leave in the process."""
    wakeup_fd = signal.set_wakeup_fd(-1)
    signal.set_wakeup_fd(wakeup_fd)
    loggers = [logging.root, *logging.root.manager.loggerDict.values()]
    return {
        "threads": sorted(thread.name for thread in threading.enumerate()),
        "signal handlers": [signal.getsignal(number) for number in NUMBERS],
        "wakeup fd": wakeup_fd,
        "environment": dict(os.environ),
        "temporary directory": tempfile.gettempdir(),
        "log files": [
            handler.baseFilename
            for logger in loggers
            for handler in getattr(logger, "handlers", [])
            if isinstance(handler, logging.FileHandler)
        ],
    }


@pytest.mark.slow  # Most tests of commands run them in one process, one after another.
@pytest.mark.usefixtures("small_lenet")
def test_commands_one_after_another_are_those_of_fresh_processes(
    tmp_path, small_data, small_program, monkeypatch
):
    monkeypatch.setenv("FASHION_MNIST_DIR", str(small_data))
    logs = {}

    def run(name, *words, code=0):
        before = state_of_process()
        result = run_here(*words, *TRAINING, f"--out={tmp_path / name}")
        assert result.returncode == code, result.stdout + result.stderr
        after = state_of_process()
        assert {key for key in after if after[key] != before[key]} == set()
        logs[name, code] = (tmp_path / name / "log.txt").read_text()

    run("first", "train", "--precision=mixed_bfloat16", "--deterministic")
    with after_step(3, lambda: os.kill(os.getpid(), signal.SIGINT)):
        run("interrupted", "train", code=130)
    run("second", "train")
    run("interrupted", "train")
    run_ok(*TRAINING, f"--out={tmp_path}/fresh", program=small_program, env=dict(os.environ))
    hashes = {name: load_summary(tmp_path / name).weights_sha256
              for name in ("first", "second", "interrupted", "fresh")}  # fmt: skip
    assert hashes["second"] == hashes["interrupted"] == hashes["fresh"] != hashes["first"]
    for (name, code), log in logs.items():  # Each has the lines of its own command alone.
        now = (tmp_path / name / "log.txt").read_text()
        assert now.startswith(log) and (now == log) == (code == 0)
