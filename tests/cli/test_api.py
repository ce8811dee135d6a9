"""Tests the commands called from Python."""

import os
import pickle
import re
import signal
import threading

import numpy as np
import pytest

from app import Config, LockstepError, run
from app.records.history import load_history, load_summary
from app.runtime.errors import ConfigError, OutputError
from tests.conftest import ROOT, assert_ok, run_python
from tests.in_process import ThreadAsProcess, restored_process, run_here, threads_as_processes


def training(small_data, out, **options):
    return Config.of(
        data_dir=str(small_data), allow_unverified_data=True, recipe="d2l", device="cpu",
        num_devices=2, out=str(out), **options,
    )  # fmt: skip


@pytest.fixture
def here(monkeypatch):
    """Makes `run` use a thread instead of a process."""
    monkeypatch.setattr("app.api.ChildProcess", ThreadAsProcess)
    monkeypatch.setattr("app.api.signals.install", lambda: None)  # For the main thread only.
    with restored_process(), threads_as_processes():
        yield


@pytest.mark.parity
def test_an_interrupted_call_has_saved_and_goes_on_when_repeated(
    small_data, small_program, small_lenet, tmp_path, monkeypatch, request
):
    """In a process of its own, as a script calls it; the rest in this one."""
    out = tmp_path / "run"
    # So many epochs that the signal comes before the last.
    config = training(small_data, out, epochs=4)
    is_over = threading.Event()

    def interrupt():
        while not (out / "history.jsonl").exists() and not is_over.wait(0.02):
            pass
        if not is_over.is_set():
            os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt, daemon=True)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.syspath_prepend(small_program)
        thread.start()
        try:
            run(config)
        finally:
            is_over.set()
            thread.join(20)
    done = len(load_history(out))
    assert 0 < done < 4 and load_summary(out).status == "running"
    request.getfixturevalue("here")
    summary = run(config)
    assert summary == load_summary(out)
    assert summary.num_replicas == 2 and summary.status == "finished"
    assert len(load_history(out)) == 4

    config = Config.of("evaluate", run=str(out), strategy="mirrored", device="cpu", num_devices=3,
        data_dir=str(small_data), allow_unverified_data=True,
    )  # fmt: skip
    assert run(config) == summary.test_accuracy
    np.save(out / "blank.npy", np.zeros((2, 28, 28), np.uint8))
    probabilities = run(Config.of("evaluate", run=str(out), images=(str(out / "blank.npy"),)))
    assert probabilities.shape == (2, 10)
    np.testing.assert_allclose(probabilities.sum(axis=1), 1, rtol=1e-6)


def test_errors_are_exceptions_with_the_program_s_exit_code(tmp_path, here):
    config = Config.of("evaluate", run=str(tmp_path / "nowhere"))
    with pytest.raises(OutputError, match="nowhere") as refusal:
        run(config)
    code = run_here("evaluate", f"--run={config.evaluation.run}").returncode
    assert refusal.value.exit_code == 5 == code


@pytest.mark.slow
@pytest.mark.parametrize("source", ["docs/library.md", "examples/own_loop.py"])
def test_what_the_page_shows_can_be_run(source, tmp_path):
    """As a script without `if __name__ == "__main__"`, somewhere else; on fewer images."""
    text = (ROOT / source).read_text(encoding="utf-8")
    told = ["\ntest accuracy 0."]
    if source.endswith(".md"):
        (text,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
        sentence = "manual is not the training on one device: lost part (replica)"
        told = [f"\n{sentence}", "\n9 mismatch in manual; see"]
    (tmp_path / "script.py").write_text(text.replace("6000", "600"))
    result = assert_ok(run_python("script.py", cwd=tmp_path, env={"PYTHONPATH": str(ROOT)}))
    assert all(each in result.stdout for each in told)


@pytest.mark.slow
def test_the_example_trains_and_verifies(
    small_data, small_lenet, here, tmp_path, monkeypatch, capsys
):
    """On fewer images, in this process."""
    text = (ROOT / "examples" / "train_and_verify.py").read_text(encoding="utf-8")
    data = f"data_dir={str(small_data)!r}, allow_unverified_data=True, device='cpu'"
    assert text.count("num_devices=2") == 2
    text = text.replace("6000", "600").replace("num_devices=2", f"num_devices=2, {data}")
    monkeypatch.chdir(tmp_path)
    exec(compile(text, "train_and_verify.py", "exec"), {})
    lines = capsys.readouterr().out.splitlines()
    assert any(re.fullmatch(r"test accuracy 0\.\d{4}", line) for line in lines)
    assert lines[-1] == "verdict: clean"


def test_errors_travel_between_processes():
    for error in (ConfigError("a; b"), LockstepError("a training failed", 7), LockstepError("x")):
        other = pickle.loads(pickle.dumps(error))
        expected = type(error), str(error), error.exit_code
        assert (type(other), str(other), other.exit_code) == expected
