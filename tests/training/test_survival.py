"""What a run survives, as a user sees it: signals, stalls, kills; each in processes of its own."""

import contextlib
import json
import os
import re
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
from tests.conftest import ROOT, make_small, processes_of, program_environment, wait_until
from tests.in_process import run_here, run_here_ok

pytestmark = [
    pytest.mark.parity,  # Processes have TensorFlow's optimizer, too.
    pytest.mark.usefixtures("small"),  # Of the processes: `small_program`.
]

TRAIN = [
    *("--device=cpu", "--dataset=synthetic", "--num_train_examples=400", "--deterministic"),
    *("--global_batch_size=20", "--epochs=2", "--checkpoint_every=2"),
]
MANUAL = [*TRAIN, "--num_devices=2"]
WORKERS = ["train", *TRAIN, "--strategy=multi_worker", "--num_workers=2"]


@contextlib.contextmanager
def started(program, folder, *arguments, slow_call=0, sec=3600):
    """Starts the program, one of whose calls takes longer; it is killed in the end.

    Args:
        folder: a directory for its temporary files.
    """
    slow = [ROOT / "tests" / "failing_program.py", program, f"step:{slow_call}:{sec}"]
    with subprocess.Popen(
        [sys.executable, *slow, *arguments],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        env=program_environment(TMPDIR=str(folder)),
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    ) as process:  # fmt: skip
        try:
            yield process
        finally:
            process.kill()


def wait_for_checkpoint(process, run_dir):
    wait_until(lambda: checkpoint_paths(run_dir) or process.poll() is not None)
    assert process.poll() is None


def end(process, code):
    """Waits for the end with this exit code; returns what was printed."""
    text, _ = process.communicate(timeout=200)
    assert process.returncode == code and "Traceback" not in text, text
    return text


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    """The weights of the same training in this process."""
    out = tmp_path_factory.mktemp("whole") / "run"
    with pytest.MonkeyPatch.context() as patch:
        make_small(patch)
        run_here_ok("train", *MANUAL, f"--out={out}")
    return load_summary(out)["weights_sha256"]


def test_a_signal_saves_and_names_the_command_that_resumes(tmp_path, small_program, expected):
    run_dir = tmp_path / "my run"
    words = [*MANUAL, f"--out={run_dir}"]
    # The fourth call takes a second: the signal comes in mid-epoch, whatever the machine.
    with started(small_program, tmp_path, *words, slow_call=4, sec=1) as process:
        wait_for_checkpoint(process, run_dir)
        process.send_signal(signal.SIGINT)
        last = end(process, 130).splitlines()[-1]
    assert last.startswith("interrupted; the state is saved; resume with: ")
    step = int(checkpoint_paths(run_dir)[-1].name.split("-")[1])
    assert 0 < step < 40
    words = shlex.split(last.partition("resume with: ")[2])
    assert words[0] == shown_python() and words[-1] == f"--out={run_dir}"
    assert f"resuming after step {step}, " in run_here_ok(*words[2:]).stdout
    assert load_summary(run_dir)["weights_sha256"] == expected
    assert [record.epoch for record in load_history(run_dir)] == [1, 2]


@pytest.mark.slow
def test_a_call_that_hangs_is_ended_by_a_second_signal_or_with_its_stacks_in_the_log(
    tmp_path, small_program
):
    words = [*MANUAL, f"--out={tmp_path}/run"]
    with started(small_program, tmp_path, *words, slow_call=3) as process:
        wait_for_checkpoint(process, tmp_path / "run")  # After the second call.
        time.sleep(2)
        process.send_signal(signal.SIGTERM)
        time.sleep(0.5)
        process.send_signal(signal.SIGINT)
        told = "a second SIGINT: exiting now; the last checkpoint is kept"
        assert end(process, 130).splitlines()[-1] == told
    words.append("--stall_timeout_sec=20")
    with started(small_program, tmp_path, *words, slow_call=3) as process:
        assert end(process, 142).splitlines()[-1].startswith("error: no progress for 20 s")
    log = (tmp_path / "run" / "log.txt").read_text()
    assert "in call" in log and "in _train" in log


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_comparison_hands_the_signal_on_and_its_training_saves(tmp_path, small_program, number):
    """After SIGKILL, the training ends with it, and its checkpoint is there."""
    out = tmp_path / "c"
    words = ["compare", "--strategies=manual,mirrored", *MANUAL, "--epochs=5000", f"--out={out}"]
    with started(small_program, tmp_path, *words) as process:
        wait_for_checkpoint(process, out / "manual")
        process.send_signal(number)
        if number == signal.SIGTERM:
            told = f"state is saved; resume with: {shown_python()} "
            assert told in end(process, 143).splitlines()[-1]
            assert "terminated" in (out / "manual" / "log.txt").read_text()
        else:
            process.communicate(timeout=60)
    # The kernel releases the lock of the training when its process has ended.
    wait_until(lambda: is_unlocked(out / "manual"))
    assert checkpoint_paths(out / "manual") and not (out / "mirrored").exists()
    assert is_unlocked(out)


def is_unlocked(path):
    with contextlib.suppress(Exception), open_run_directory(path, {}):
        return True
    return False


def test_a_comparison_does_not_follow_links(tmp_path):
    (tmp_path / "elsewhere").mkdir()
    with open_run_directory(tmp_path / "c", {}) as run_directory:
        run_directory.start(overwrite=False)
    (tmp_path / "c" / "manual").symlink_to("../elsewhere")
    words = "compare", "--strategies=manual,mirrored", *MANUAL, f"--out={tmp_path}/c", "--overwrite"
    result = run_here(*words)
    assert result.returncode == 5 and "manual is a symbolic link" in result.stderr
    assert list((tmp_path / "elsewhere").iterdir()) == []


# Workers on this machine, which `train --num_workers` starts.


@pytest.mark.slow
def test_a_stop_is_passed_on_and_a_killed_worker_costs_a_restart(expected, small_program, tmp_path):
    out = tmp_path / "run"
    with started(small_program, tmp_path, *WORKERS, f"--out={out}") as process:
        wait_for_checkpoint(process, out)
        process.send_signal(signal.SIGTERM)
        last = end(process, 143).splitlines()[-1]
    assert f"the state is saved; resume with: {shown_python()}" in last
    assert "--num_workers=2" in last
    with started(small_program, tmp_path, *WORKERS, f"--out={out}") as process:
        wait_until(lambda: len(workers(tmp_path)) == 2)
        os.kill(workers(tmp_path)[0], signal.SIGKILL)
        text = end(process, 0)
    assert "worker 0 ended with code 137" in text and "worker 1: training" in text
    assert "restart 1 of 3" in text and "resuming after" in text
    assert text.splitlines()[-1].startswith("test acc: ") and text.count("test acc: ") == 1
    summary = load_summary(out)
    names = ("num_replicas", "num_test_examples", "steps", "weights_sha256")
    assert [summary[name] for name in names] == [2, 200, 40, expected]


@pytest.mark.slow
def test_the_death_of_the_starter_leaves_nothing(small_program, tmp_path):
    out = tmp_path / "run"
    with started(small_program, tmp_path, *WORKERS, f"--out={out}") as process:
        wait_for_checkpoint(process, out)
        found = workers(tmp_path)
        assert set(found) == {0, 1}
        os.kill(found[1], signal.SIGSTOP)  # A stopped process ends only by SIGKILL.
        process.kill()
        process.wait(60)
        wait_until(lambda: not processes_of(tmp_path))


def workers(folder):
    """Returns index → process of the workers that are there now."""
    found = {}
    for pid, environment in processes_of(folder).items():
        if config := re.search(r"TF_CONFIG=([^\0]*)", environment):
            found[json.loads(config[1])["task"]["index"]] = pid
    return found
