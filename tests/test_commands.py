"""Tests the program end to end, mostly in this process, some in a separate one."""

import contextlib
import functools
import json
import os
import shlex
import subprocess
import sys
import tempfile

import numpy as np
import pytest

from app.data.synthetic import generate_synthetic
from app.options import Config, split_numbers
from app.options.names import COMPARED_BY_DEFAULT, ONE_MACHINE_STRATEGIES
from app.records.checkpoint import find_newest_checkpoint
from app.records.event_file import event_files
from app.records.history import load_summary
from app.runtime import temporary_directories
from conftest import program_environment, run_main, run_ok
from in_process import run_here, run_here_ok
from models import MODELS

SMALL = ["--num_train_examples=500", "--recipe=fast", "--epochs=1", "--allow_unverified_data"]
ON_CPUS = ["--device=cpu", "--num_devices=2"]


pytestmark = pytest.mark.e2e


@pytest.fixture(autouse=True)
def _small(small_data, monkeypatch):
    monkeypatch.setitem(MODELS, "lenet", "dense_network:build_three_dense_layers")
    monkeypatch.setenv("FASHION_MNIST_DIR", str(small_data))


@pytest.fixture(scope="module")
def runs(tmp_path_factory, small_data):
    """One small run for each strategy, and what it printed."""
    folder = tmp_path_factory.mktemp("runs")
    printed = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(MODELS, "lenet", "dense_network:build_three_dense_layers")
        for strategy in ONE_MACHINE_STRATEGIES:
            devices = ["--device=cpu"] if strategy == "single" else ON_CPUS
            printed[strategy] = run_here_ok(
                f"--strategy={strategy}",
                *devices,
                *SMALL,
                f"--out={folder}/{strategy}",
                env={"FASHION_MNIST_DIR": str(small_data)},
            )
    return folder, printed


def test_train_in_a_process_of_its_own(tmp_path):
    """With LeNet itself, and with all that TensorFlow and the system write between our lines."""
    result = run_ok(*ON_CPUS, *SMALL, f"--out={tmp_path}/run")
    check_run(tmp_path / "run", result, "manual")
    assert load_summary(tmp_path / "run").num_parameters == 129_068


@pytest.mark.parametrize("strategy", ONE_MACHINE_STRATEGIES)
def test_train(runs, strategy):
    folder, printed = runs
    check_run(folder / strategy, printed[strategy], strategy)


def check_run(run_dir, output, strategy):
    """Checks what a training has printed and left."""
    summary = load_summary(run_dir)
    assert summary.status == "finished" and summary.strategy == strategy
    config = Config.of("train", strategy=strategy)
    num_devices = 1 if strategy == "single" else 2
    assert len(summary.devices) == num_devices
    counts = summary.num_replicas, summary.num_shards, summary.num_copies
    functions = split_numbers.num_replicas, split_numbers.num_shards, split_numbers.num_copies
    assert counts == tuple(f(strategy, config.distribution, num_devices) for f in functions)
    assert output.stdout.splitlines()[-1] == summary.last_line()
    # TensorFlow's own messages are held back; what is not Fashion-MNIST is told, twice.
    told = output.stderr.splitlines()
    assert all(line.startswith("WARNING: ") for line in told)
    assert sum("UNVERIFIED" in line for line in told) == 2
    assert "\r" not in output.stdout and "\x1b" not in output.stdout  # Plain lines on a pipe.
    names = {path.name for path in run_dir.iterdir()}
    assert names == {
        ".lock", "log.txt", "config.json", "history.jsonl", "summary.json",
        "checkpoints", *(path.name for path in event_files(run_dir)),
        "accuracy.png", "accuracy.svg",
    }  # fmt: skip
    assert summary.last_line() in (run_dir / "log.txt").read_text()


def test_manual_and_mirrored_are_the_same_training(runs):
    folder, _ = runs
    summaries = [load_summary(folder / strategy) for strategy in ("manual", "mirrored")]
    assert summaries[0].weights_sha256 == summaries[1].weights_sha256


def test_a_finished_run_prints_its_result_again(runs, tmp_path, monkeypatch):
    folder, printed = runs
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(temporary_directories, "_MIN_AGE_SEC", 0)
    left = tmp_path / "lockstep-tmp-killed"  # Killed after it had written its summary.
    left.mkdir()
    before = (folder / "manual" / "summary.json").stat().st_mtime_ns
    again = run_here_ok(*ON_CPUS, *SMALL, f"--out={folder}/manual")
    assert again.stdout.splitlines()[-1] == printed["manual"].stdout.splitlines()[-1]
    assert "already finished" in again.stdout and not left.exists()
    assert (folder / "manual" / "summary.json").stat().st_mtime_ns == before


def test_the_result_of_other_replicas_is_not_passed_off(runs):
    folder, _ = runs
    result = run_here("--device=cpu", "--num_devices=3", *SMALL, f"--out={folder}/manual")
    assert result.returncode == 4 and "(devices 2 → 3)" in result.stderr


def test_overwrite_loses_nothing_when_the_new_run_is_refused(runs):
    folder, _ = runs
    result = run_here(*ON_CPUS, "--data_dir=/nonexistent", "--overwrite", f"--out={folder}/manual")
    assert result.returncode == 3
    assert load_summary(folder / "manual").status == "finished"
    assert find_newest_checkpoint(folder / "manual")


def test_evaluate_refuses_other_images_than_the_run_s(runs, small_data, tmp_path):
    folder, _ = runs
    for path in small_data.iterdir():
        content = path.read_bytes()
        (tmp_path / path.name).write_bytes(
            content[:-1] + bytes([content[-1] ^ 1]) if "t10k-images" in path.name else content
        )
    result = run_here(
        "evaluate", f"--run={folder}/manual", f"--data_dir={tmp_path}", "--allow_unverified_data"
    )
    assert result.returncode == 3 and "not those of" in result.stderr


def test_deterministic_runs_are_the_same_training(tmp_path):
    command = ["compare", "--strategies=manual,mirrored", "--deterministic", *ON_CPUS, *SMALL]
    result = run_here_ok(*command, f"--out={tmp_path}/c")
    assert "manual and mirrored: bit-identical" in result.stdout
    assert json.loads((tmp_path / "c" / "manual" / "config.json").read_text())["deterministic"]


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
    assert "images/s" in text and "\x1b[" in text and "/2" in text
    assert text.rstrip().endswith("['/device:CPU:0', '/device:CPU:1']")


def test_another_configuration_in_the_same_directory_is_refused(runs):
    folder, _ = runs
    result = run_here(*ON_CPUS, *SMALL, "--seed=3", f"--out={folder}/manual")
    assert result.returncode == 4
    assert "seed 0 → 3" in result.stderr and result.stderr.count("\n") == 1


@pytest.mark.parametrize("strategy", ONE_MACHINE_STRATEGIES)
def test_evaluate_on_any_strategy(runs, strategy):
    folder, _ = runs
    devices = ["--device=cpu"] + (["--num_devices=3"] if strategy != "single" else [])
    result = run_here_ok(
        "evaluate",
        f"--run={folder}/manual",
        f"--strategy={strategy}",
        *devices,
        "--allow_unverified_data",
    )
    accuracy = load_summary(folder / "manual").test_accuracy
    assert f"test acc: {accuracy:.4f}" in result.stdout.splitlines()[-1]
    assert "of 200 right" in result.stdout


def test_evaluate_classifies_files_in_their_order(runs, tmp_path):
    folder, _ = runs
    np.save(tmp_path / "two.npy", np.zeros((2, 28, 28), np.uint8))
    files = f"--images={tmp_path}/two.npy"
    output = run_here_ok("evaluate", f"--run={folder}/manual", files, "--strategy=mirrored").stdout
    assert output.startswith(f"lenet of {folder}/manual, mirrored on ['/device:CPU:0'")
    rows = [line.split() for line in output.splitlines() if "two.npy[" in line]
    assert [row[0] for row in rows] == [f"{tmp_path}/two.npy[{i}]" for i in (0, 1)]
    assert rows[0][1:] == rows[1][1:] and 0.1 <= float(rows[0][-1]) <= 1


def test_compare(tmp_path):
    command = ["compare", *ON_CPUS, *SMALL, f"--out={tmp_path}/c"]
    result = run_here_ok(*command)
    assert "manual and mirrored: bit-identical weights after 2 steps" in result.stdout
    assert "simulated devices" in result.stdout
    lines = result.stdout.splitlines()
    assert [line.split()[0] for line in lines if line.endswith("x")] == list(COMPARED_BY_DEFAULT)
    saved = json.loads((tmp_path / "c" / "compare.json").read_text())
    assert [run["strategy"] for run in saved["runs"]] == list(COMPARED_BY_DEFAULT)
    assert saved["runs"][0]["num_replicas"] == 1 and saved["runs"][1]["num_replicas"] == 2
    assert len(saved["verdicts"]) == 3
    for name in ("accuracy.png", "accuracy.svg"):
        assert (tmp_path / "c" / name).stat().st_size > 10_000
    page = (tmp_path / "c" / "report.html").read_text(encoding="utf-8")
    assert all(f"c/{name}" in page for name in COMPARED_BY_DEFAULT)
    assert "bit-identical" in page and ", report.html" in result.stdout
    of_all = run_here("evaluate", f"--run={tmp_path}/c")
    assert of_all.returncode == 5 and f"--run={tmp_path}/c/single" in of_all.stderr
    again = run_here_ok(*command)
    assert again.stdout.count("already finished") == len(COMPARED_BY_DEFAULT)


def test_compare_ends_with_the_code_of_a_training_that_failed(tmp_path, small_program):
    """A training is a process, as ever."""
    result = run_main(
        "compare", "--strategies=manual,mirrored", *SMALL, "--global_batch_size=50", "--lr=1e30",
        f"--out={tmp_path}/c", program=small_program,
    )  # fmt: skip
    assert result.returncode == 7
    told, last = result.stderr.splitlines()[-2:]
    assert "learning rate 1e+30" in told
    assert last.startswith("error: the training with manual failed with exit code 7")
    assert not (tmp_path / "c" / "mirrored").exists()


def test_a_start_that_is_refused_leaves_no_directory(tmp_path):
    result = run_here("--data_dir=/nonexistent", f"--out={tmp_path}/run")
    assert result.returncode == 3
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "redirection", [">&-", pytest.param(">/dev/full 2>&-", marks=pytest.mark.slow)]
)
def test_closed_streams_do_not_stop_the_training(tmp_path, small_program, redirection):
    command = shlex.join([sys.executable, f"{small_program}/main.py", *ON_CPUS, *SMALL])
    out = tmp_path / "run"
    result = subprocess.run(
        f"{command} {shlex.quote(f'--out={out}')} {redirection}",
        shell=True, capture_output=True, env=program_environment(), check=False,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    assert load_summary(out).status == "finished"


def test_reading_what_is_no_run(tmp_path):
    result = run_here("evaluate", f"--run={tmp_path}")
    assert result.returncode == 5 and "not the directory of a run" in result.stderr
    assert result.stderr.count("\n") == 1


def test_a_run_without_a_checkpoint(tmp_path, runs):
    folder, _ = runs
    (tmp_path / "config.json").write_text((folder / "manual" / "config.json").read_text())
    result = run_here("evaluate", f"--run={tmp_path}")
    assert result.returncode == 4 and "no checkpoint" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "code", "told"),
    [
        (["--device=gpu", "--num_devices=2"], 6, "TensorFlow sees no GPU"),
        (["--out=/dev/null/x"], 5, "--out=/dev/null/x"),
    ],
)
def test_refusals_after_the_flags(arguments, code, told, tmp_path, no_gpu):
    out = [] if arguments[0].startswith("--out") else [f"--out={tmp_path}/run"]
    result = run_here(*arguments, *out)
    assert result.returncode == code
    assert told in result.stderr and result.stderr.count("\n") == 1


def test_num_gpus_on_a_machine_without_one_says_so_where_one_looks(tmp_path, no_gpu):
    result = run_here_ok("--num_gpus=2", *SMALL, f"--out={tmp_path}/run")
    assert load_summary(tmp_path / "run").num_replicas == 2
    assert result.stderr.count("WARNING: --num_gpus=2") == 2  # At the start and before the end.


def test_generated_images_in_place_of_real_ones_say_so(tmp_path, monkeypatch):
    few = functools.partial(generate_synthetic, num_train=600, num_test=100)
    monkeypatch.setattr("app.data.dataset_loader.generate_synthetic", few)
    result = run_here_ok(
        *SMALL, f"--out={tmp_path}/run",
        env={"FASHION_MNIST_DIR": "", "TFDS_DATA_DIR": f"{tmp_path}/none"},
    )  # fmt: skip
    assert result.stderr.count("WARNING: GENERATED") == 2
    assert load_summary(tmp_path / "run").dataset == "synthetic"


def test_a_reader_that_goes_away_does_not_stop_the_training(tmp_path, small_program):
    process = subprocess.Popen(
        [sys.executable, small_program / "main.py", *ON_CPUS, *SMALL, f"--out={tmp_path}/run"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    process.stdout.close()
    errors = process.stderr.read()
    assert process.wait(timeout=120) == 0
    assert "Traceback" not in errors and "BrokenPipe" not in errors
    assert load_summary(tmp_path / "run").status == "finished"


def test_a_bug_leaves_its_traceback_in_the_log(tmp_path, monkeypatch):
    """A training that divides by zero stands for any bug."""

    def fail(*arguments):
        raise ZeroDivisionError("oops")

    monkeypatch.setattr("app.commands.train._train", fail)
    result = run_here(f"--out={tmp_path}/run")
    assert result.returncode == 1
    assert result.stderr.count("\n") == 1 and "ZeroDivisionError: oops" in result.stderr
    assert "Traceback" in (tmp_path / "run" / "log.txt").read_text()
