"""The recorder of JAX: its files hold what was trained, and recording changes nothing.

The trainings of `jax_cases.py` run in processes: with what stands in for JAX, and with JAX itself
where an interpreter has it, that of the tests or `LOCKSTEP_JAX_PYTHON`.
"""

import functools
import importlib.util
import json
import os
import re
import subprocess
import sys

import numpy as np
import pytest

from conftest import ROOT
from lockstep import compare

SCRIPTS = ROOT / "tests/recorder_scripts"
PYTHON = os.environ.get("LOCKSTEP_JAX_PYTHON") or (
    sys.executable if importlib.util.find_spec("jax") else ""
)
needs_jax = pytest.mark.skipif(not PYTHON, reason="needs JAX (LOCKSTEP_JAX_PYTHON)")


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """Returns a function that runs all trainings; it returns folder and results."""

    @functools.cache
    def run(framework):
        folder = tmp_path_factory.mktemp(framework)
        paths = [ROOT] + [SCRIPTS / "stand_in"] * (framework == "stand-in")
        done = subprocess.run(
            [PYTHON if framework == "jax" else sys.executable, SCRIPTS / "jax_cases.py", folder],
            env={
                **os.environ,
                "PYTHONPATH": os.pathsep.join(map(str, paths)),
                "JAX_PLATFORMS": "cpu",
            },
            capture_output=True,
            text=True,
            timeout=400,
            check=False,
        )
        assert done.returncode == 0, done.stderr[-3000:]
        assert done.stderr.count(" steps was recorded") == 1 and "none of 6" in done.stderr
        return folder, json.loads((folder / "results.json").read_text())

    return run


@pytest.fixture(params=["stand-in", pytest.param("jax", marks=[pytest.mark.slow, needs_jax])])
def case(request, recorded):
    """Returns the folder and the results of a case."""
    folder, results = recorded(request.param)
    return lambda name: (folder / name, results[name])


class Trace:
    """A file of a recorder: `about`, and the arrays of a step, kind and replica in order."""

    def __init__(self, path):
        with np.load(path) as file:
            self.members = dict(file)
        self.about = json.loads(str(self.members.pop("about")))

    def get(self, position, kind, replica=0):
        prefix = f"{position}/{kind}/{replica}/"
        names = [name for name in self.members if name.startswith(prefix)]
        return [self.members[f"{prefix}{index}"] for index in range(len(names))]


def is_equal(first, second):
    return len(first) == len(second) and all(map(np.array_equal, first, second))


def is_close(first, second):
    return len(first) == len(second) and all(map(np.allclose, first, second, [1e-4] * len(first)))


def mean(*per_replica):
    return [np.mean(arrays, axis=0) for arrays in zip(*per_replica, strict=True)]


def test_a_shard_map_step_is_recorded_on_each_device_without_a_change(case):
    folder, result = case("shard_map")
    assert result["recorded"] == result["plain"]
    trace = Trace(folder / "two.npz")
    about = trace.about
    assert about["format"] == "lockstep trace" and about["version"] == 2
    assert (about["framework"], about["order"]) == ("jax", "reduce, clip")
    assert (about["num_replicas"], about["replicas"]) == (2, [0, 1])
    assert (about["steps"], about["reduction"]) == ([0, 2, 4], "mean")
    assert about["gradients"] == ["a/bias", "a/kernel", "b/kernel"]
    assert [v["layout"] for v in about["variables"]] == ["", "IO", "IO", "", "IO", "IO", ""]
    assert [v["kind"] for v in about["variables"]] == ["weight"] * 3 + ["optimizer state"] * 3 + [
        "seed"
    ]
    assert about["variables"][4] == {
        **{"name": "opt_state/a/kernel", "kind": "optimizer state", "layout": "IO"},
        **{"of": "a/kernel", "slot": "momentum"},
    }
    sgd = {"learning_rate": 0.1, "momentum": 0.9}
    assert about["optimizer"] == {"class": "SGD", "framework": "jax", **sgd}
    assert about["settings"][0] == [{**sgd, "weights": about["gradients"]}]
    assert (about["permuted"], about["replayed"]) == (None, None)
    for position, size in ((1, 4), (2, 4), (3, 2)):  # The last batch is shorter.
        assert [a.shape for a in trace.get(position, "data", 1)] == [(size, 5), (size, 2)]
        raw = [trace.get(position, "raw", replica) for replica in range(2)]
        assert not is_equal(*raw)
        for replica in range(2):
            sums = trace.get(position, "sums", replica)
            clipped = trace.get(position, "clipped", replica)
            before, after = (trace.get(position, kind, replica) for kind in ("before", "after"))
            assert is_close(sums, mean(*raw))
            assert is_equal(clipped, [a.clip(-0.5, 0.5) for a in sums])
            velocity = [0.9 * v + g for v, g in zip(before[3:6], clipped, strict=True)]
            assert is_close(after[3:6], velocity)
            assert is_close(
                after[:3], [p - 0.1 * v for p, v in zip(before[:3], velocity, strict=True)]
            )
        keys = [trace.get(position, "random", replica)[0] for replica in range(2)]
        assert keys[0].dtype == np.uint8 and not np.array_equal(*keys)
        losses = [trace.get(position, "loss", replica)[0] for replica in range(2)]
        assert losses[0].shape == () and losses[0] != losses[1]
    # Steps that are not recorded run the same compiled function.
    assert result["unrecorded"] == result["plain"]
    assert not result["retraced"] and not result["has_callback"]
    assert not (folder / "none.npz").exists()
    assert not compare(folder / "two.npz").findings


def test_replay_loads_the_state_of_the_other_trace_and_permute_keeps_the_examples(case):
    folder, result = case("replay")
    one, two, replayed, permuted, of_torch = (
        Trace(folder / f"{name}.npz") for name in ("one", "two", "replayed", "permuted", "of_torch")
    )
    assert replayed.about["replayed"] == "one.npz" and permuted.about["permuted"] == 5
    assert not is_equal(two.get(3, "before"), one.get(3, "before"))  # Other rounding.
    moved = []
    for position in (1, 2, 3):
        for replica in range(2):
            assert is_equal(replayed.get(position, "before", replica), one.get(position, "before"))
            assert is_equal(
                of_torch.get(position, "before", replica)[:3], one.get(position, "before")[:3]
            )
            rows, others = (t.get(position, "data", replica)[0] for t in (replayed, permuted))
            moved += [not np.array_equal(rows, others)]
            assert np.array_equal(rows[rows[:, 0].argsort()], others[others[:, 0].argsort()])
        targets = np.concatenate([permuted.get(position, "data", r)[1] for r in range(2)])
        images = np.concatenate([permuted.get(position, "data", r)[0] for r in range(2)])
        assert np.array_equal(images[:, :2], targets)
        sums = one.get(position, "sums")
        assert is_close(replayed.get(position, "sums"), sums)
        assert is_close(permuted.get(position, "sums"), sums)
    verdict = compare(folder / "one.npz", folder / "replayed.npz")
    assert verdict.ok and {"gradients", "update"} <= {*verdict.checked}
    assert sum(moved) > 3  # A permutation of few examples may leave them where they are.
    assert re.search(r"one.npz: no step \[1\]; use steps=\[0, 2, 4\]$", result["missing_step"])
    assert result["missing_file"].endswith("none.npz: no such file; record it first")
    assert "no weight for a/kernel (5, 7) among [('b.weight', (7, 2))]" in result["wrong_name"]


def test_a_pmap_step_is_recorded_without_its_axis_of_devices(case):
    folder, result = case("pmap")
    assert result["recorded"] == result["plain"]
    two, one, permuted = (Trace(folder / f"{n}.npz") for n in ("two", "one", "permuted"))
    assert two.about["num_replicas"] == 2 and one.about["num_replicas"] == 1
    moved = []
    for position in (1, 2, 3):
        shapes = [a.shape for a in two.get(position, "before", 1)]
        assert shapes == [(7,), (5, 7), (7, 2)] * 2 + [(2,)]
        raw = [two.get(position, "raw", replica) for replica in range(2)]
        assert not is_equal(*raw) and is_close(two.get(position, "sums"), mean(*raw))
        keys = [two.get(position, "random", replica)[0] for replica in range(2)]
        assert not np.array_equal(*keys)
        assert is_equal(one.get(position, "before")[:6], two.get(position, "before")[:6])
        x, permuted_x = (t.get(position, "data", 1)[0] for t in (two, permuted))
        moved += [not np.array_equal(x, permuted_x)]
        assert np.array_equal(np.sort(x, axis=0), np.sort(permuted_x, axis=0))
    assert any(moved)
    assert result["no_axis"] == "pmap: batch of shape (8, 5) has no axis of devices"


def test_a_jit_step_with_shardings_has_no_gradient_of_one_device(case):
    folder, result = case("jit")
    assert result["recorded_one"] == result["one"]
    two, one = Trace(folder / "two.npz"), Trace(folder / "one.npz")
    assert (one.about["num_replicas"], two.about["num_replicas"]) == (1, 2)
    slots = [(v["of"], v["slot"]) for v in two.about["variables"] if "slot" in v]
    assert slots[:2] == [("", "count"), ("a/bias", "mu")] and slots[-1] == ("b/kernel", "nu")
    names = [v["name"] for v in two.about["variables"]]
    count = two.get(1, "before")[names.index("opt_state/count")]
    assert count.dtype == np.int32 and count == 0
    kinds = {v["name"]: v["kind"] for v in two.about["variables"]}
    assert kinds["state/mean"] == "statistic" and kinds["key"] == "seed"
    assert [s[0]["learning_rate"] for s in two.about["settings"]] == [0.0, 0.01, 0.02]
    assert two.about["reduction"] == "" and not two.get(1, "raw")
    for position in (1, 2, 3):
        assert is_equal(two.get(position, "before", 1), one.get(position, "before"))
        assert is_close(two.get(position, "sums", 1), one.get(position, "sums"))
        assert is_close(two.get(position, "after", 1), one.get(position, "after"))
        assert two.get(position, "random", 0) and not two.get(position, "random", 1)
        assert two.get(position, "data", 1)[0].shape == (4, 5)


def test_errors_are_one_line_and_recorded_steps_are_kept(case):
    folder, result = case("errors")
    assert result["interrupted"] == "interrupted"
    assert Trace(folder / "interrupted.npz").about["steps"] == [0, 2]
    assert result["kept"], "a file that could not be written replaced the one before"
    assert result["no_key"].startswith("key: no array at 'seed' among 0/a/bias, 0/a/kernel")
    assert result["no_batch"].startswith("batch is missing; add it to arguments")
    assert result["no_output"].startswith("opt_state is missing; add it to arguments")
    assert result["twice"] == "keep('sums'): 2 calls in a step; keep all at once"
    assert result["kind"].startswith("keep: unknown kind 'grads'; use one of raw, sums")
