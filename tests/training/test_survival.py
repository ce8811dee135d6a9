"""What a run survives, as a user sees it: signals, stalls, kills; each in processes of its own."""

import contextlib
import shlex
import signal
import subprocess
import sys
import time

import pytest

from app.console import shown_python
from app.records.checkpoint import checkpoint_paths
from app.records.history import load_history, load_summary
from app.records.run_directory import open_run_directory
from tests.conftest import ROOT, program_environment
from tests.in_process import run_here, run_here_ok

pytestmark = [
    pytest.mark.parity,  # Processes have TensorFlow's optimizer, too.
    pytest.mark.usefixtures("small_data", "small_lenet"),  # Of the processes: `small_program`.
]

TRAIN = [
    *("--device=cpu", "--num_devices=2", "--dataset=synthetic", "--num_train_examples=200"),
    *("--global_batch_size=20", "--epochs=2", "--checkpoint_every=2", "--deterministic"),
]
COMPARE = ["compare", "--strategies=manual,mirrored", *TRAIN]


@contextlib.contextmanager
def started(program, *arguments, slow_call, sec=3600):
    """Starts the program, one of whose calls takes longer; it is killed in the end."""
    slow = [ROOT / "tests" / "training" / "failing_steps.py", program, str(slow_call), str(sec)]
    process = subprocess.Popen(
        [sys.executable, *slow, *arguments],
        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=program_environment(),
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )  # fmt: skip
    with process:
        try:
            yield process
        finally:
            process.kill()


def wait_for_checkpoint(process, run_dir):
    deadline = time.monotonic() + 60
    while not checkpoint_paths(run_dir):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.02)


def end(process, timeout=60):
    """Waits for the end; returns the exit code and the last line of standard error."""
    _, errors = process.communicate(timeout=timeout)
    assert "Traceback" not in errors
    return process.returncode, errors.splitlines()[-1]


def test_a_signal_saves_and_names_the_command_that_resumes(tmp_path, small_program):
    run_dir = tmp_path / "my run"
    # The fourth call takes a second: the signal comes in mid-epoch, whatever the machine.
    with started(small_program, *TRAIN, f"--out={run_dir}", slow_call=4, sec=1) as process:
        wait_for_checkpoint(process, run_dir)
        process.send_signal(signal.SIGINT)
        code, last = end(process)
    assert code == 130 and last.startswith("interrupted; the state is saved; resume with: ")
    step = int(checkpoint_paths(run_dir)[-1].name.split("-")[1])
    assert 0 < step < 20
    words = shlex.split(last.partition("resume with: ")[2])
    assert words[0] == shown_python() and words[-1] == f"--out={run_dir}"
    assert f"resuming after step {step}, " in run_here_ok(*words[2:]).stdout
    run_here_ok(*TRAIN, f"--out={tmp_path}/whole")
    resumed, whole = load_summary(run_dir), load_summary(tmp_path / "whole")
    assert resumed["weights_sha256"] == whole["weights_sha256"]
    assert [record.epoch for record in load_history(run_dir)] == [1, 2]


@pytest.mark.slow
def test_a_second_signal_ends_a_call_that_hangs(tmp_path, small_program):
    with started(small_program, *TRAIN, f"--out={tmp_path}/run", slow_call=3) as process:
        wait_for_checkpoint(process, tmp_path / "run")  # After the second call.
        time.sleep(2)
        process.send_signal(signal.SIGTERM)
        time.sleep(0.5)
        process.send_signal(signal.SIGINT)
        told = "a second SIGINT: exiting now; the last checkpoint is kept"
        assert end(process) == (130, told)


@pytest.mark.slow
def test_a_stall_ends_with_the_stacks_in_the_log(tmp_path, small_program):
    words = [*TRAIN, f"--out={tmp_path}/run", "--stall_timeout_sec=20"]
    with started(small_program, *words, slow_call=3) as process:
        code, last = end(process, timeout=200)
    assert code == 142 and last.startswith("error: no progress for 20 s")
    log = (tmp_path / "run" / "log.txt").read_text()
    assert "in step" in log and "in _train" in log


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_comparison_hands_the_signal_on_and_its_training_saves(tmp_path, small_program, number):
    """After SIGKILL, the training ends with it, and its checkpoint is there."""
    out = tmp_path / "c"
    words = [*COMPARE, "--epochs=5000", f"--out={out}"]
    with started(small_program, *words, slow_call=10**9) as process:
        wait_for_checkpoint(process, out / "manual")
        process.send_signal(number)
        if number == signal.SIGTERM:
            code, last = end(process)
            assert code == 143 and f"state is saved; resume with: {shown_python()} " in last
            assert "terminated" in (out / "manual" / "log.txt").read_text()
        else:
            process.communicate(timeout=60)
    deadline = time.monotonic() + 20
    while True:  # The kernel releases the lock of the training when its process has ended.
        with contextlib.suppress(Exception), open_run_directory(out / "manual", {}):
            break
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert checkpoint_paths(out / "manual") and not (out / "mirrored").exists()
    with open_run_directory(out, {}):
        pass


def test_a_comparison_does_not_follow_links(tmp_path):
    (tmp_path / "elsewhere").mkdir()
    with open_run_directory(tmp_path / "c", {}) as run_directory:
        run_directory.start(overwrite=False)
    (tmp_path / "c" / "manual").symlink_to("../elsewhere")
    result = run_here(*COMPARE, f"--out={tmp_path}/c", "--overwrite")
    assert result.returncode == 5 and "manual is a symbolic link" in result.stderr
    assert list((tmp_path / "elsewhere").iterdir()) == []
