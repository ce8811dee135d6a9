"""Tests the commands: what they print, leave and return; mostly in this process."""

import json
import shlex
import shutil
import subprocess
import sys
from unittest import mock

import numpy as np
import pytest
import rich

from app.commands import benchmark
from app.records.checkpoint import find_newest_checkpoint
from app.records.history import (
    DATASET_CAVEATS,
    TIMING_CAVEAT,
    event_files,
    last_lines,
    load_summary,
)
from strategies import ALL_REDUCE_ALGORITHMS
from tests import in_process
from tests.cli.report_samples import Page, write_config
from tests.conftest import assert_ok, copy_program, make_small, run_main
from tests.in_process import run_here, run_here_ok

SMALL = ["--dataset=synthetic", "--num_train_examples=500", "--epochs=1"]
ON_CPUS = ["--device=cpu", "--num_devices=2"]
COMPARE = ["compare", "--deterministic", *ON_CPUS, *SMALL]
COMPARED = ("single", "manual", "mirrored")

pytestmark = pytest.mark.usefixtures("small")


@pytest.fixture(scope="module")
def compared(tmp_path_factory):
    """The directory of a comparison, and what it printed."""
    folder = tmp_path_factory.mktemp("compared") / "c"
    with pytest.MonkeyPatch.context() as patch:
        make_small(patch)
        return folder, run_here_ok(*COMPARE, f"--out={folder}")


def last_line(run_dir):
    return last_lines(load_summary(run_dir))[-1]


def test_train_in_a_process_of_its_own(tmp_path):
    """With LeNet itself, a user's settings of Keras, and all that TensorFlow prints."""
    keras_json = {"floatx": "float64", "backend": "jax", "image_data_format": "channels_first"}
    (tmp_path / "keras.json").write_text(json.dumps(keras_json))
    env = {"FASHION_MNIST_DIR": "", "TFDS_DATA_DIR": f"{tmp_path}/none", "https_proxy": ""}
    env |= {"KERAS_HOME": str(tmp_path), "KERAS_BACKEND": "torch"}
    copy_program(program := tmp_path / "program")  # It generates few images.
    words = *ON_CPUS, *SMALL, f"--out={tmp_path}/run"
    result = assert_ok(run_main(*words, program=program, env=env))
    check_run(tmp_path / "run", "manual")
    assert load_summary(tmp_path / "run")["num_parameters"] == 129_068
    state = find_newest_checkpoint(tmp_path / "run").state
    assert {array.dtype.name for array in state.values()} == {"float32", "int64"}
    said = result.stdout.splitlines()
    assert said[-1] == last_line(tmp_path / "run")
    assert f"saved in {tmp_path}/run; open {tmp_path}/run/accuracy.png" in said
    assert "replicas on /device:CPU:0, /device:CPU:1" in said
    # TensorFlow's own messages are held back.
    assert all(line.startswith("WARNING: ") for line in result.stderr.splitlines())
    assert "\r" not in result.stdout and "\x1b" not in result.stdout  # Plain lines on a pipe.


def check_run(run_dir, strategy):
    """Checks the files of a training on two devices, and its summary."""
    summary = load_summary(run_dir)
    assert summary["status"] == "finished" and summary["strategy"] == strategy
    num_devices = 1 if strategy == "single" else 2
    counts = len(summary["devices"]), summary["num_replicas"], summary["num_shards"]
    assert counts == (num_devices,) * 3
    names = {path.name for path in run_dir.iterdir()}
    assert names == {
        ".lock", "log.txt", "config.json", "history.jsonl", "summary.json",
        "checkpoints", *(path.name for path in event_files(run_dir)),
        "accuracy.png", "accuracy.svg",
    }  # fmt: skip
    assert last_line(run_dir) in (run_dir / "log.txt").read_text()


def test_a_comparison_prints_and_leaves_its_verdicts(compared):
    folder, result = compared
    for name in COMPARED:
        check_run(folder / name, name)
        assert last_line(folder / name) in result.stdout.splitlines()
    verdict = "manual and mirrored end with bitwise identical weights"
    assert result.stdout.count(verdict) == 1 and "manual and mirrored:" not in result.stdout
    assert "simulated devices" in result.stdout and ", report.html" in result.stdout
    saved = json.loads((folder / "compare.json").read_text())
    found = [(run["strategy"], run["num_replicas"]) for run in saved["runs"]]
    assert found == [("single", 1), ("manual", 2), ("mirrored", 2)] and len(saved["pairs"]) == 3
    for name in ("accuracy.png", "accuracy.svg"):
        assert (folder / name).stat().st_size > 10_000
    page = Page(folder / "report.html")
    (good,) = page.paragraphs("good")
    assert good.startswith(verdict) and "bitwise identical weights: manual, mirrored" in page.text
    sizes = saved["pairs"][0]
    shown = [f"{sizes['absolute']:.4g}", f"{sizes['relative']:.4g}", sizes["where"]]
    assert page.row("single – manual")[1:] == ["different, as expected", *shown]
    assert page.row("manual")[:2] == ["manual", "2 simulated"]
    generated = f"{DATASET_CAVEATS['synthetic']} ({', '.join(COMPARED)})"
    assert generated in page.paragraphs("caveat")
    again = run_here_ok(*COMPARE, "--strategies=manual,single,mirrored", f"--out={folder}")
    assert again.stdout.count("already finished") == len(COMPARED)
    assert json.loads((folder / "compare.json").read_text()) == saved  # In any order.


def test_a_finished_run_stays_if_a_run_that_would_overwrite_it_is_refused(compared):
    run_dir = compared[0] / "manual"
    before = (run_dir / "summary.json").stat().st_mtime_ns
    refused = run_here(*ON_CPUS, "--data_dir=/nonexistent", "--overwrite", f"--out={run_dir}")
    assert refused.returncode == 3 and find_newest_checkpoint(run_dir)
    assert (run_dir / "summary.json").stat().st_mtime_ns == before


@pytest.mark.parametrize("damage", [None, '{"written_by": "lockstep", "format": 3}'])
def test_lost_or_edited_records_are_written_again(compared, tmp_path, damage):
    """Checkpoints have them, too."""
    run_dir = shutil.copytree(compared[0] / "manual", tmp_path / "run")
    names = "config.json", "summary.json", "history.jsonl"
    texts = [(run_dir / name).read_text() for name in names]
    for name in names:
        (run_dir / name).unlink()
        if damage:
            (run_dir / name).write_text(damage)
    again = run_here_ok(*ON_CPUS, *SMALL, "--deterministic", f"--out={run_dir}")
    assert "config.json was not as this run began; written again" in again.stderr
    assert "already finished" in again.stdout
    assert again.stdout.splitlines()[-1] == last_line(run_dir)
    assert [(run_dir / name).read_text() for name in names] == texts


def test_evaluate_on_another_strategy(compared):
    words = "--strategy=sharded", "--num_devices=3", "--device=cpu"
    result = run_here_ok("evaluate", f"--run={compared[0]}/manual", *words)
    accuracy = load_summary(compared[0] / "manual")["test_accuracy"]
    assert f"test acc: {accuracy:.4f}" in result.stdout.splitlines()[-1]
    assert "of 200 right" in result.stdout
    own = run_here_ok("evaluate", f"--run={compared[0]}/mirrored", "--device=cpu")
    assert f"test acc: {accuracy:.4f} with mirrored" in own.stdout.splitlines()[-1]


def test_compare_ends_with_the_code_of_a_training_that_failed(tmp_path):
    command = ["compare", "--strategies=manual,mirrored", *ON_CPUS, *SMALL, "--batch_size=50"]
    result = run_here(*command, "--lr=3e38", f"--out={tmp_path}/c")
    assert result.returncode == 7
    told, last = result.stderr.splitlines()[-2:]
    assert "learning rate 3e+38" in told
    assert last.startswith("error: the training with manual failed with exit code 7")
    assert not (tmp_path / "c" / "mirrored").exists()


def test_generated_images_simulated_gpus_and_a_fault_say_so_where_one_looks(
    tmp_path, no_gpu, no_data
):
    out, fault = tmp_path / "run", "scale_gradient:factor=0.5"
    command = ["--num_gpus=2", *SMALL[1:], f"--out={out}"]
    result = run_here_ok(*command, f"--inject={fault}")
    assert result.stderr.count("WARNING: GENERATED") == 2  # At the start and before the end.
    assert result.stderr.count("and cannot be downloaded (") == 1
    assert result.stderr.count(f"WARNING: injected fault: {fault}") == 2
    assert result.stderr.count("2 devices asked for, but this machine has no GPU") == 1
    summary = load_summary(out)
    names = "dataset", "num_replicas", "injected_fault"
    assert [summary[name] for name in names] == ["synthetic", 2, fault]
    assert find_newest_checkpoint(out).metadata.config["inject"] == fault
    for name in ("config.json", "log.txt"):
        assert fault in (out / name).read_text()
    assert fault in run_here_ok("evaluate", f"--run={out}", "--device=cpu").stderr
    run_here_ok("report", out)
    told = f"injected fault: {fault}; the result is wrong on purpose"
    expected = {told, TIMING_CAVEAT, DATASET_CAVEATS["synthetic"]}
    assert {*Page(out / "report.html").paragraphs("caveat")} == expected


def test_a_bug_leaves_its_traceback_in_the_log(tmp_path, monkeypatch):
    fails = mock.Mock(side_effect=ZeroDivisionError("oops"))
    monkeypatch.setattr("app.data.fashion_mnist.load_data", fails)
    result = run_here(*ON_CPUS, f"--out={tmp_path}/run", "--overwrite")
    assert result.returncode == 1
    assert result.stderr.count("\n") == 1 and "ZeroDivisionError: oops" in result.stderr
    assert "Traceback" in (tmp_path / "run" / "log.txt").read_text()


@pytest.mark.parametrize("redirection", [">&-", ">/dev/full 2>&-", "| true"])
def test_closed_streams_do_not_stop_a_command(tmp_path, redirection):
    write_config(tmp_path / "run")
    command = shlex.join([sys.executable, "main.py", "report", f"{tmp_path}/run"])
    result = subprocess.run(
        ["bash", "-c", f"set -o pipefail; {command} {redirection}"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert (result.returncode, result.stderr) == (0, "")
    assert (tmp_path / "run" / "report.html").exists()


def test_a_terminal_gets_a_live_bar(tmp_path, monkeypatch):
    monkeypatch.setattr(in_process.Captured, "isatty", lambda self: True)
    monkeypatch.setattr(rich, "_console", None)  # An earlier one may have another width.
    environment = {"TERM": "xterm", "COLUMNS": "100"}
    text = run_here_ok(*ON_CPUS, *SMALL, f"--out={tmp_path}/run", env=environment).stdout
    assert "images/s" in text and "\x1b[" in text
    assert "2/2" in text and "epoch 1/1" in text  # Steps, and what is done.
    assert text.rstrip().endswith("['/device:CPU:0', '/device:CPU:1']")


# `benchmark`


def test_a_benchmark_times_each_strategy_in_each_round(tmp_path, monkeypatch):
    monkeypatch.setattr(benchmark, "NUM_ROUNDS", 5)
    monkeypatch.setattr(benchmark, "BLOCK_SEC", 0.01)
    words = ["benchmark", "--strategies=single,manual", *ON_CPUS, *SMALL[:2], f"--out={tmp_path}/b"]
    result = run_here_ok(*words)
    record = json.loads((tmp_path / "b" / "benchmark.json").read_text())
    single, manual = record["cases"]
    assert (single["speedup"], len(manual["sec"])) == (None, 5)
    assert manual["speedup"]["low"] <= manual["speedup"]["median"] <= manual["speedup"]["high"]
    page = Page(tmp_path / "b" / "report.html")
    for case, name in ((single, "single on 1 device"), (manual, "manual on 2 devices")):
        assert f"{case['images_per_sec']['median']:,.0f}" == page.row(name)[1]
        assert page.row(name)[1] in result.stdout
    low, high = (f"{manual['images_per_sec'][name]:,.0f}" for name in ("low", "high"))
    speedup = f"{manual['speedup']['median']:.3f}"
    assert page.row("manual on 2 devices")[2:4] == [f"{low}–{high}", speedup]
    assert "timing is not scaling" in result.stdout and page.paragraphs("caveat") == [TIMING_CAVEAT]


def test_an_interval_is_of_rounds():
    # What slows all of a round is no difference; values that differ have a wide interval.
    slowed = np.array([1.0, 2.0, 3.0, 1.0, 2.0, 3.0])
    both = benchmark.interval(3 * slowed, slowed)
    assert both == pytest.approx({"median": 3, "low": 3, "high": 3})
    alone = benchmark.interval(slowed)
    assert alone["low"] < alone["median"] == 2 < alone["high"]


# `demo`


def demo(*words):
    """Runs an experiment; returns its output in one line."""
    return " ".join(run_here_ok("demo", *words).stdout.split())


def test_the_experiments_of_d2l_on_2_3_and_4_devices():
    output = demo("allreduce")
    assert "/device:CPU:0 [[1. 1.]] [[3. 3.]] /device:CPU:1 [[2. 2.]] [[3. 3.]]" in output
    for name in ALL_REDUCE_ALGORITHMS["manual"]:
        assert f"{name} every device has [[3. 3.]]" in output
    output = demo("split_batch")
    assert "3 devices: shards of 2, 1, 1" in output
    assert "Their mean is 9.5. The mean of the devices' own means (4.5, 12, 17) is 11.17" in output
    four = demo("split_batch", "--num_devices=4", "--device=cpu")
    assert "correct only because these shards have equal sizes" in four
    output = demo("replicate", "--dataset=synthetic")
    assert output.count("] yes") == 6 and output.count("] no") == 2
    assert "7,850 weights on each device are bitwise identical" in output
