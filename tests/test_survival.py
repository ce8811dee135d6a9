"""What a run survives, as a user sees it: signals, stalls, kills; each in processes of its own."""

import os
import shlex
import signal
import subprocess
import sys
import time

import pytest

from app.records.checkpoint import checkpoint_paths
from app.records.history import load_history, load_summary
from app.records.run_directory import open_log, open_run_directory
from app.runtime.errors import OutputError
from app.runtime.run_context import RunContext
from app.runtime.shown_command import shown_python
from conftest import ROOT, program_environment, run_ok
from in_process import run_here

TRAIN = [
    *("--device=cpu", "--num_devices=2", "--allow_unverified_data", "--num_train_examples=200"),
    *("--global_batch_size=20", "--epochs=2", "--checkpoint_every=2"),
    "--deterministic",
]
COMPARE = ["compare", "--strategies=manual,mirrored", *TRAIN]


@pytest.fixture(autouse=True)
def _small_data(small_data, monkeypatch):
    monkeypatch.setenv("FASHION_MNIST_DIR", str(small_data))


def start(program, *arguments, slow_step=0, sec=3600):
    """Starts the program, one of whose steps takes longer."""
    slow = [ROOT / "tests" / "failing_steps.py", program, str(slow_step), str(sec)]
    return subprocess.Popen(
        [sys.executable, *(slow if slow_step else [program / "main.py"]), *arguments],
        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=program_environment(),
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )  # fmt: skip


def wait_for_checkpoint(process, run_dir):
    deadline = time.monotonic() + 60
    while not checkpoint_paths(run_dir):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.02)


def end(process, timeout=30):
    """Waits for the end; returns the exit code and the last line of standard error."""
    _, errors = process.communicate(timeout=timeout)
    assert "Traceback" not in errors
    return process.returncode, errors.splitlines()[-1]


@pytest.fixture(scope="module")
def whole_run(tmp_path_factory, small_data, small_program):
    run_dir = tmp_path_factory.mktemp("whole")
    temporary = tmp_path_factory.mktemp("tmp")
    environment = {"FASHION_MNIST_DIR": str(small_data), "TMPDIR": str(temporary)}
    run_ok(*TRAIN, f"--out={run_dir}", env=environment, program=small_program)
    assert list(temporary.iterdir()) == []  # TensorFlow would leave some twenty files there.
    return load_summary(run_dir)


@pytest.mark.e2e
@pytest.mark.parametrize(
    ("signal_number", "code", "what"),
    [
        (signal.SIGINT, 130, "interrupted"),
        pytest.param(signal.SIGTERM, 143, "terminated", marks=pytest.mark.slow),
    ],
)
def test_a_signal_saves_and_names_the_command_that_goes_on(
    tmp_path, small_program, whole_run, signal_number, code, what
):
    run_dir = tmp_path / "my run"
    # Every fourth step takes a second: the signal comes in mid-epoch, whatever the machine.
    process = start(small_program, *TRAIN, f"--out={run_dir}", slow_step=4, sec=1)
    wait_for_checkpoint(process, run_dir)
    process.send_signal(signal_number)
    found_code, last = end(process)
    assert found_code == code and last.startswith(f"{what}; the state is saved; resume with: ")
    step = int(checkpoint_paths(run_dir)[-1].name.split("-")[1])
    assert 0 < step < 20
    if signal_number == signal.SIGINT:
        return  # What follows is the same for both.
    words = shlex.split(last.partition("resume with: ")[2])
    assert words[0] == shown_python() and words[-1] == f"--out={run_dir}"
    resumed = run_ok(*words[2:], program=small_program)
    assert f"step {step}\n" in resumed.stdout
    assert load_summary(run_dir).weights_sha256 == whole_run.weights_sha256
    assert [record.epoch for record in load_history(run_dir)] == [1, 2]


@pytest.mark.e2e
def test_a_second_signal_leaves_at_once(tmp_path, small_program):
    """A step that hangs stands for a long compiled call, which no handler can interrupt."""
    process = start(small_program, *TRAIN, f"--out={tmp_path}/run", slow_step=3)
    wait_for_checkpoint(process, tmp_path / "run")
    time.sleep(0.5)
    process.send_signal(signal.SIGTERM)
    time.sleep(0.5)
    assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    assert end(process, timeout=5) == (
        143,
        "a second SIGTERM: exiting now; the last checkpoint is kept",
    )
    (path,) = checkpoint_paths(tmp_path / "run")
    assert path.name == "step-00000002-epoch-0000"


@pytest.mark.e2e
def test_a_stall_ends_with_the_stacks_in_the_log(tmp_path, small_program):
    process = start(
        small_program, *TRAIN, f"--out={tmp_path}/run", "--stall_timeout_sec=20", slow_step=3
    )
    code, last = end(process, timeout=200)
    assert code == 138 and last.startswith("error: no progress for 20 s")
    log = (tmp_path / "run" / "log.txt").read_text()
    assert "in <lambda>" in log and "in _train_epoch" in log


@pytest.mark.e2e
def test_a_comparison_hands_the_signal_on_and_its_training_saves(tmp_path, small_program):
    process = start(
        small_program, "compare", "--strategies=manual,mirrored", *TRAIN, f"--out={tmp_path}/c"
    )
    wait_for_checkpoint(process, tmp_path / "c" / "manual")
    process.send_signal(signal.SIGTERM)
    code, last = end(process)
    assert code == 143 and f"the state is saved; resume with: {shown_python()} " in last
    assert not (tmp_path / "c" / "mirrored").exists()
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "c" / "manual").rename(tmp_path / "moved")
    (tmp_path / "c" / "manual").symlink_to("../elsewhere")
    result = run_here(*COMPARE, f"--out={tmp_path}/c")
    assert result.returncode == 5 and "manual is a symbolic link" in result.stderr
    assert list((tmp_path / "elsewhere").iterdir()) == []


@pytest.mark.e2e
def test_a_comparison_that_is_killed_leaves_no_training_behind(tmp_path, small_program):
    process = start(
        small_program, "compare", "--strategies=manual,mirrored", *TRAIN, f"--out={tmp_path}/c"
    )
    wait_for_checkpoint(process, tmp_path / "c" / "manual")
    process.kill()
    process.communicate()
    deadline = time.monotonic() + 20
    log = tmp_path / "c" / "manual" / "log.txt"
    while "terminated" not in log.read_text():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    with open_run_directory(tmp_path / "c", {}):  # The lock is released.
        pass


@pytest.mark.parametrize(
    "out", ["/dev/null/x", "a" * 300, "~nosuchuser/x", "/proc/x", "{folder}/file", "{folder}/pipe"]
)
def test_places_that_are_no_directories(tmp_path, out):
    (tmp_path / "file").write_text("")
    os.mkfifo(tmp_path / "pipe")
    result = run_here(*TRAIN, f"--out={out.format(folder=tmp_path)}")
    assert result.returncode == 5 and result.stderr.count("\n") == 1
    assert result.stderr.startswith("error: ")


@pytest.mark.parametrize("name", [".lock", "log.txt", "config.json"])
def test_pipes_in_the_place_of_records_are_refused(tmp_path, name):
    """Whether at the start or when it is first written to: never a wait for the other end."""
    with open_run_directory(tmp_path, {}) as run_directory:
        run_directory.start(overwrite=False)
    (tmp_path / name).unlink(missing_ok=True)
    os.mkfifo(tmp_path / name)
    with RunContext(), pytest.raises(OutputError), open_run_directory(tmp_path, {}):
        open_log(tmp_path)
