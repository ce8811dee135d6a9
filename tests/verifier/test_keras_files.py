"""Files of Keras' recorder: samples of large arrays, and arrays that are written as they come."""

import json
import os
import socket
import subprocess
import sys

import pytest

from lockstep import compare
from lockstep.data.file import load
from lockstep.numeric.sampling import Sampled
from tests.verifier.recorder_scripts import FOLDER, ROOT
from tests.verifier.recorder_scripts.recording import node_of


def start(folder, *arguments, **environment):
    given = {"PYTHONPATH": str(ROOT), "TF_CPP_MIN_LOG_LEVEL": "3"} | environment
    return subprocess.Popen(
        [sys.executable, FOLDER / "keras_sampled.py", *arguments], cwd=folder, text=True,
        env={**os.environ, **given}, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


def run(folder, *arguments):
    """Returns the exit code of a training, the sum of its weights, and its errors."""
    process = start(folder, *arguments)
    printed, errors = process.communicate(timeout=300)
    return process.returncode, printed, errors


def verdict_of(folder):
    return compare(str(folder / "one.npz"), str(folder / "two.npz"))


@pytest.mark.slow
def test_sampled_recordings(tmp_path):
    assert run(tmp_path, "one.npz")[0] == 0
    for kind, bug, node in (("loop", "row", "gradient"), ("fit", "loss", "loss"), ("loop", "", "")):
        code, _, errors = run(tmp_path, "two.npz", kind, bug)
        assert code == 0, errors
        verdict = verdict_of(tmp_path)
        assert node_of(verdict) == node, (bug, str(verdict))
    traces = [load(tmp_path / name) for name in ("one.npz", "two.npz")]
    first, second = (trace.named(0, "before", trace.copies[-1]) for trace in traces)
    large = [name for name, array in first.items() if isinstance(array, Sampled)]
    assert len(large) > 2 and all(first[name].is_same(second[name]) for name in large)


@pytest.mark.slow
def test_each_of_several_processes_writes_its_samples(tmp_path):
    assert run(tmp_path, "one.npz")[0] == 0
    with socket.create_server(("", 0)) as first, socket.create_server(("", 0)) as second:
        workers = [f"localhost:{each.getsockname()[1]}" for each in (first, second)]
    configs = [
        json.dumps({"cluster": {"worker": workers}, "task": {"type": "worker", "index": index}})
        for index in range(2)
    ]
    processes = [start(tmp_path, "two.npz", "workers", TF_CONFIG=config) for config in configs]
    ended = [process.communicate(timeout=300) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], ended
    names = ["one.npz", "two.rank0.npz", "two.rank1.npz"]
    assert sorted(path.name for path in tmp_path.iterdir()) == names
    assert verdict_of(tmp_path).status == "clean"


@pytest.mark.slow
def test_a_full_disk_is_one_line_and_the_training_goes_on(tmp_path):
    code, weights, _ = run(tmp_path, "whole.npz", "whole")
    assert code == 0 and load(tmp_path / "whole.npz").steps == (0, 1, 2)
    code, own, errors = run(tmp_path, "full.npz", "full")
    assert (code, own) == (0, weights)
    reason = "cannot be written (File too large); the training is not recorded"
    assert [x for x in errors.splitlines() if "full.npz" in x] == [f"lockstep: full.npz: {reason}"]
    assert (tmp_path / "full.npz").stat().st_size == 0
