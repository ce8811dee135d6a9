"""Tests the commands: what they print, leave and return; mostly in this process."""

import contextlib
import functools
import json
import os
import shlex
import subprocess
import sys

import numpy as np
import pytest

from app.data.synthetic import generate_synthetic
from app.options import Config
from app.options.names import COMPARED_BY_DEFAULT
from app.records.checkpoint import find_newest_checkpoint
from app.records.event_file import event_files
from app.records.history import load_summary
from models import MODELS
from strategies.layout import layout_of
from tests.cli.report_samples import write_training
from tests.conftest import program_environment, run_ok
from tests.in_process import run_here, run_here_ok

SMALL = ["--num_train_examples=500", "--epochs=1", "--allow_unverified_data"]
ON_CPUS = ["--device=cpu", "--num_devices=2"]
COMPARE = ["compare", "--deterministic", *ON_CPUS, *SMALL]


@pytest.fixture(autouse=True)
def _small(small_data, monkeypatch):
    monkeypatch.setitem(MODELS, "lenet", "tests.dense_network:build_three_dense_layers")
    monkeypatch.setenv("FASHION_MNIST_DIR", str(small_data))


@pytest.fixture(scope="module")
def compared(tmp_path_factory, small_data):
    """The directory of a comparison, and what it printed."""
    folder = tmp_path_factory.mktemp("compared") / "c"
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(MODELS, "lenet", "tests.dense_network:build_three_dense_layers")
        patch.setenv("FASHION_MNIST_DIR", str(small_data))
        return folder, run_here_ok(*COMPARE, f"--out={folder}")


def test_train_in_a_process_of_its_own(tmp_path):
    """With LeNet itself, and with all that TensorFlow and the system write between our lines."""
    result = run_ok(*ON_CPUS, *SMALL, "--recipe=fast", f"--out={tmp_path}/run")
    check_run(tmp_path / "run", "manual")
    summary = load_summary(tmp_path / "run")
    assert summary.num_parameters == 129_068
    said = result.stdout.splitlines()
    assert said[-1] == summary.last_line() and summary.compile_sec > 0
    assert f"saved in {tmp_path}/run; open {tmp_path}/run/accuracy.png" in said
    assert "replicas on /device:CPU:0, /device:CPU:1" in said
    # TensorFlow's own messages are held back; what is not Fashion-MNIST is told, twice.
    told = result.stderr.splitlines()
    assert all(line.startswith("WARNING: ") for line in told)
    assert sum("UNVERIFIED" in line for line in told) == 2
    assert "\r" not in result.stdout and "\x1b" not in result.stdout  # Plain lines on a pipe.


@pytest.mark.parametrize("strategy", COMPARED_BY_DEFAULT)
def test_what_a_training_leaves(compared, strategy):
    folder, result = compared
    check_run(folder / strategy, strategy)
    assert load_summary(folder / strategy).last_line() in result.stdout.splitlines()


def check_run(run_dir, strategy):
    """Checks the files of a training on two devices, and its summary."""
    summary = load_summary(run_dir)
    assert summary.status == "finished" and summary.strategy == strategy
    config = Config.of("train", strategy=strategy)
    num_devices = 1 if strategy == "single" else 2
    assert len(summary.devices) == num_devices
    counts = summary.num_replicas, summary.num_shards, summary.num_copies
    layout = layout_of(strategy, config.distribution, num_devices)
    assert counts == (layout.num_replicas, layout.num_shards, layout.num_copies)
    names = {path.name for path in run_dir.iterdir()}
    assert names == {
        ".lock", "log.txt", "config.json", "history.jsonl", "summary.json",
        "checkpoints", *(path.name for path in event_files(run_dir)),
        "accuracy.png", "accuracy.svg",
    }  # fmt: skip
    assert summary.last_line() in (run_dir / "log.txt").read_text()


def names_in_table(folder):
    """Returns the first column of the table of a comparison."""
    blocks = json.loads((folder / "compare.json").read_text())["shown"]["blocks"]
    (rows,) = [block["rows"] for block in blocks if isinstance(block, dict)]
    return [name for name, *_ in rows]


def test_a_comparison_prints_and_leaves_its_verdicts(compared):
    folder, result = compared
    verdict = "manual and mirrored end with bitwise identical weights"
    assert result.stdout.count(verdict) == 1 and "manual and mirrored:" not in result.stdout
    assert "simulated devices" in result.stdout and ", report.html" in result.stdout
    assert names_in_table(folder) == list(COMPARED_BY_DEFAULT)
    saved = json.loads((folder / "compare.json").read_text())
    assert [run["strategy"] for run in saved["runs"]] == list(COMPARED_BY_DEFAULT)
    assert saved["runs"][0]["num_replicas"] == 1 and saved["runs"][1]["num_replicas"] == 2
    assert len(saved["pairs"]) == 3  # Each pair.
    for name in ("accuracy.png", "accuracy.svg"):
        assert (folder / name).stat().st_size > 10_000
    page = (folder / "report.html").read_text(encoding="utf-8")
    assert all(f"c/{name}" in page for name in COMPARED_BY_DEFAULT) and verdict in page
    again = run_here_ok(*COMPARE, "--strategies=manual,single,mirrored", f"--out={folder}")
    assert again.stdout.count("already finished") == len(COMPARED_BY_DEFAULT)
    assert names_in_table(folder) == list(COMPARED_BY_DEFAULT)  # In any order.


def test_too_few_gpus_are_refused_before_the_first_training(monkeypatch, tmp_path):
    monkeypatch.setattr("app.commands.compare.query_driver", lambda: (["GPU 0"], ""))
    result = run_here("compare", "--num_gpus=2", *SMALL, f"--out={tmp_path / 'c'}")
    assert (result.returncode, result.stdout) == (6, "")
    assert "2 devices requested, but TensorFlow sees 1 GPU; use --num_gpus=1" in result.stderr


def test_a_finished_run_prints_its_result_again_and_stays(compared):
    """Also if it is overwritten by a run that is refused."""
    run_dir = compared[0] / "manual"
    before = (run_dir / "summary.json").stat().st_mtime_ns
    again = run_here_ok(*ON_CPUS, *SMALL, "--deterministic", f"--out={run_dir}")
    assert again.stdout.splitlines()[-1] == load_summary(run_dir).last_line()
    assert "already finished" in again.stdout
    refused = run_here(*ON_CPUS, "--data_dir=/nonexistent", "--overwrite", f"--out={run_dir}")
    assert refused.returncode == 3 and find_newest_checkpoint(run_dir)
    assert (run_dir / "summary.json").stat().st_mtime_ns == before


def test_evaluate_on_another_strategy(compared):
    result = run_here_ok(
        *("evaluate", f"--run={compared[0]}/manual", "--strategy=pipeline", "--device=cpu"),
        *("--num_devices=3", "--allow_unverified_data"),
    )
    accuracy = load_summary(compared[0] / "manual").test_accuracy
    assert f"test acc: {accuracy:.4f}" in result.stdout.splitlines()[-1]
    assert "of 200 right" in result.stdout


def test_evaluate_classifies_files_in_their_order(compared, tmp_path):
    run_dir = compared[0] / "manual"
    np.save(tmp_path / "two.npy", np.zeros((2, 28, 28), np.uint8))
    files = f"--images={tmp_path}/two.npy"
    output = run_here_ok("evaluate", f"--run={run_dir}", files, "--strategy=mirrored").stdout
    assert output.startswith(f"lenet of {run_dir}, mirrored on ['/device:CPU:0'")
    rows = [line.split() for line in output.splitlines() if "two.npy[" in line]
    assert [row[0] for row in rows] == [f"{tmp_path}/two.npy[{i}]" for i in (0, 1)]
    assert rows[0][1:] == rows[1][1:] and 0.1 <= float(rows[0][-1]) <= 1


def test_compare_ends_with_the_code_of_a_training_that_failed(tmp_path):
    command = ["compare", "--strategies=manual,mirrored", *SMALL, "--global_batch_size=50"]
    result = run_here(*command, "--lr=1e30", f"--out={tmp_path}/c")
    assert result.returncode == 7
    told, last = result.stderr.splitlines()[-2:]
    assert "learning rate 1e+30" in told
    assert last.startswith("error: the training with manual failed with exit code 7")
    assert not (tmp_path / "c" / "mirrored").exists()


def test_generated_images_and_simulated_gpus_say_so_where_one_looks(tmp_path, monkeypatch, no_gpu):
    few = functools.partial(generate_synthetic, num_train=600, num_test=100)
    monkeypatch.setattr("app.data.dataset_loader.generate_synthetic", few)
    result = run_here_ok(
        *("--num_gpus=2", *SMALL, f"--out={tmp_path}/run"),
        env={"FASHION_MNIST_DIR": "", "TFDS_DATA_DIR": f"{tmp_path}/none"},
    )
    # At the start and before the end.
    assert result.stderr.count("WARNING: GENERATED") == 2
    assert result.stderr.count("--num_gpus=2") == 1
    summary = load_summary(tmp_path / "run")
    assert (summary.dataset, summary.num_replicas) == ("synthetic", 2)


def test_a_bug_leaves_its_traceback_in_the_log(tmp_path, monkeypatch):
    """A training that divides by zero stands for any bug."""

    def fail(*arguments):
        raise ZeroDivisionError("oops")

    monkeypatch.setattr("app.commands.train._train", fail)
    result = run_here(f"--out={tmp_path}/run")
    assert result.returncode == 1
    assert result.stderr.count("\n") == 1 and "ZeroDivisionError: oops" in result.stderr
    assert "Traceback" in (tmp_path / "run" / "log.txt").read_text()


@pytest.mark.parametrize("redirection", [">&-", ">/dev/full 2>&-", "| true"])
def test_closed_streams_do_not_stop_a_command(tmp_path, redirection):
    write_training(tmp_path / "run")
    command = shlex.join([sys.executable, "main.py", "report", f"{tmp_path}/run"])
    result = subprocess.run(
        ["bash", "-c", f"set -o pipefail; {command} {redirection}"],
        capture_output=True, text=True, env=program_environment(), check=False,
    )  # fmt: skip
    assert (result.returncode, result.stderr) == (0, "")
    assert (tmp_path / "run" / "report.html").exists()


@pytest.mark.slow
def test_a_terminal_gets_a_live_bar(tmp_path, small_program):
    import pty

    leader, follower = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, small_program / "main.py", *ON_CPUS, *SMALL, f"--out={tmp_path}/run"],
        stdout=follower, stderr=follower, env=program_environment(TERM="xterm", COLUMNS="100"),
    )  # fmt: skip
    os.close(follower)
    shown = b""
    with contextlib.suppress(OSError):  # The end of a terminal is an error to its reader.
        while chunk := os.read(leader, 4096):
            shown += chunk
    assert process.wait(60) == 0
    text = shown.decode()
    assert "images/s" in text and "\x1b[" in text
    assert "2/2" in text and "epoch 1/1" in text  # Steps, and what is done.
    assert text.rstrip().endswith("['/device:CPU:0', '/device:CPU:1']")
