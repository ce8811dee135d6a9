"""Tests the commands called from Python: `app.run`."""

import os
import pickle
import re
import signal
import threading
import time

import pytest

import app
from app import Config, LockstepError
from app.errors import OutputError
from app.records.history import load_history, load_summary
from tests.conftest import ROOT, assert_ok, run_python
from tests.in_process import restored_process, run_here, threads_as_processes


@pytest.fixture
def here(monkeypatch):
    """Makes `run` use a thread instead of a process."""
    monkeypatch.setattr("app.signals.install", lambda: None)  # For the main thread only.
    with restored_process(), threads_as_processes():
        yield


def test_a_call_trains_and_returns_the_summary_and_another_evaluates(small, tmp_path, here):
    options = {"dataset": "synthetic", "device": "cpu", "num_devices": 2, "epochs": 1}
    summary = app.run(Config.of(**options, out=str(tmp_path / "run")))
    assert summary == load_summary(tmp_path / "run") and summary["status"] == "finished"
    found = app.run(Config.of("evaluate", run=str(tmp_path / "run"), device="cpu"))
    assert found == summary["test_accuracy"]


@pytest.mark.slow
def test_an_interrupted_call_has_saved(small, tmp_path, small_program, monkeypatch):
    """In a process of its own, as a script calls it, with epochs for some minutes."""
    out = tmp_path / "run"
    options = {"dataset": "synthetic", "device": "cpu", "num_devices": 2, "epochs": 9999}
    monkeypatch.syspath_prepend(small_program)

    def interrupt():
        while not (out / "history.jsonl").exists():
            time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt, daemon=True).start()
    with pytest.raises(KeyboardInterrupt):
        app.run(Config.of(**options, out=str(out)))
    assert load_history(out) and load_summary(out)["status"] == "running"


def test_errors_are_exceptions_with_the_program_s_exit_code(tmp_path, here):
    config = Config.of("evaluate", run=str(tmp_path / "nowhere"))
    with pytest.raises(OutputError, match="nowhere") as refusal:
        app.run(config)
    code = run_here("evaluate", f"--run={tmp_path}/nowhere").returncode
    assert refusal.value.exit_code == 5 == code
    for error in (refusal.value, LockstepError("a training failed", 7)):  # Between processes.
        other = pickle.loads(pickle.dumps(error))
        expected = type(error), str(error), error.exit_code
        assert (type(other), str(other), other.exit_code) == expected


@pytest.mark.slow
@pytest.mark.parametrize("name", ["own_loop", "train_and_verify"])
def test_the_examples_run_as_scripts(name, tmp_path):
    """Without `if __name__ == "__main__"`, somewhere else; on fewer, generated images."""
    text = (ROOT / "examples" / f"{name}.py").read_text(encoding="utf-8")
    for old, new in (("6000", "600"), ('device="cpu"', 'device="cpu", dataset="synthetic"')):
        assert old in text
        text = text.replace(old, new)
    (tmp_path / "script.py").write_text(text)
    result = assert_ok(run_python("script.py", cwd=tmp_path, env={"PYTHONPATH": str(ROOT)}))
    assert re.search(r"^test accuracy 0\.\d{4}$", result.stdout, re.MULTILINE)
    assert name == "own_loop" or result.stdout.splitlines()[-1] == "verdict: clean"
