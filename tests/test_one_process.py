"""Tests several commands in one process: none sees or keeps the state of another."""

import json
import os
import re
import subprocess
import sys

import pytest

from app.records.history import load_summary
from conftest import ROOT, program_environment, run_ok

pytestmark = pytest.mark.slow  # Most tests of commands run them in one process, one after another.


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return tmp_path_factory.mktemp("one process")


@pytest.fixture(scope="module")
def results(place, small_data):
    """Name of each command in `tests/one_process.py` → how it ended and what it left."""
    (place / "tmp").mkdir()
    done = subprocess.run(
        [sys.executable, str(ROOT / "tests" / "one_process.py"), str(place)],
        capture_output=True, text=True, check=True, timeout=500,
        env=program_environment(FASHION_MNIST_DIR=str(small_data), TMPDIR=str(place / "tmp")),
    )  # fmt: skip
    return json.loads(done.stdout.splitlines()[-1])


def test_each_command_ends_as_in_a_process_of_its_own(results):
    codes = {name: result["exit_code"] for name, result in results.items()}
    assert codes == {
        "first": 0, "compared": 0, "interrupted": 130, "verified": 0, "second": 0, "resumed": 0,
        "one device": 0, "three devices": 6,
    }  # fmt: skip
    told = results["three devices"]["printed"]
    assert len(told) == 1 and told[0].startswith("error: 3 CPU devices requested")
    assert "use a new process" in told[0]


def test_a_command_leaves_nothing_in_the_process(results):
    left = {name: result["left"] for name, result in results.items() if result["left"]}
    # `verify` keeps the server that has imported TensorFlow, and its socket, until the end.
    server = left.pop("verified")
    counts = {what: len(after) for what, (_, after) in server.items()}
    assert counts == {"children": 2, "temporary files": 1} and left == {}


def test_temporary_files_are_gone(results, place):
    assert os.listdir(place / "tmp") == []


def test_each_log_has_the_lines_of_its_own_command_alone(results):
    for name, result in results.items():
        if name == "interrupted":  # It is resumed in the same directory.
            assert results["resumed"]["log"].startswith(result["log"])
        else:
            assert result["log at the end"] == result["log"]
    for name in ("first", "second", "one device"):
        lines = results[name]["log"].splitlines()
        messages = [re.sub(r"^\S+ \S+ (INFO|WARNING) ", "", line) for line in lines]
        assert len(lines) > 6
        printed = [line.removeprefix("WARNING: ") for line in results[name]["printed"]]
        saved = [line for line in messages if line.startswith("Saved checkpoint step-")]
        assert saved and [line for line in messages if line not in saved] == printed


def test_the_second_training_is_that_of_a_fresh_process(results, place, small_data):
    """The first one had another precision, and was deterministic."""
    fresh = run_ok(
        "--device=cpu", "--num_devices=2", "--num_train_examples=200", "--epochs=2",
        "--global_batch_size=20", "--allow_unverified_data",
        f"--out={place}/fresh", env={"FASHION_MNIST_DIR": str(small_data)},
    )  # fmt: skip
    summaries = {
        name: load_summary(place / name) for name in ("fresh", "first", "second", "interrupted")
    }
    hashes = {name: summary.weights_sha256 for name, summary in summaries.items()}
    assert hashes["second"] == hashes["interrupted"] == hashes["fresh"] != hashes["first"]
    own = [line for line in results["second"]["printed"] if not line.startswith("WARNING: ")]
    assert fresh.stdout.splitlines()[:4] == own[:4]
