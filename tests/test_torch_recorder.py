"""The recorder of PyTorch: its files hold what was trained, and recording changes nothing.

The trainings of `torch_cases.py` run in processes: with what stands in for PyTorch, and with
PyTorch itself where an interpreter has it, that of the tests or `LOCKSTEP_TORCH_PYTHON`.
"""

import functools
import importlib.util
import json
import os
import subprocess
import sys

import numpy as np
import pytest

from conftest import ROOT
from lockstep import compare, trace_file

SCRIPTS = ROOT / "tests/recorder_scripts"
PYTHON = os.environ.get("LOCKSTEP_TORCH_PYTHON") or (
    sys.executable if importlib.util.find_spec("torch") else ""
)
needs_torch = pytest.mark.skipif(not PYTHON, reason="needs PyTorch (LOCKSTEP_TORCH_PYTHON)")
FRAMEWORKS = ["stand-in", pytest.param("torch", marks=[pytest.mark.slow, needs_torch])]
KERAS_VARIABLES = {
    "conv/kernel": ("weight", "HWIO", (2, 2, 1, 4)), "conv/bias": ("weight", "", (4,)),
    "bn/gamma": ("weight", "", (4,)), "bn/beta": ("weight", "", (4,)),
    "dense/kernel": ("weight", "IO", (64, 5)), "dense/bias": ("weight", "", (5,)),
    "bn/moving_mean": ("statistic", "", (4,)), "bn/moving_variance": ("statistic", "", (4,)),
}  # fmt: skip


class Trace:
    """The arrays of all ranks of a recording, by kind and name."""

    def __init__(self, folder, name):
        paths = sorted(folder.glob(f"{name}.rank*.npz")) or [folder / f"{name}.npz"]
        files = [np.load(path, allow_pickle=False) for path in paths]
        self.arrays = {key: file[key] for file in files for key in file.files if key != "about"}
        self.abouts = [json.loads(str(file["about"])) for file in files]
        self.about = self.abouts[0]
        self.variables = [v["name"] for v in self.about["variables"]]

    def kind(self, kind, step=0, replica=0):
        """Returns the arrays of a kind by index, for variables and gradients by name."""
        position = self.about["steps"].index(step) + 1
        prefix = f"{position}/{kind}/{replica}/"
        found = {k.removeprefix(prefix): x for k, x in self.arrays.items() if k.startswith(prefix)}
        names = {"before": self.variables, "after": self.variables}.get(kind)
        names = self.about["gradients"] if kind in ("raw", "sums", "clipped") else names
        rename = {str(i): name for i, name in enumerate(names or [])}
        parts = {key: key.split("/", 1) for key in found}
        return {"/".join([rename.get(a, a), *b]): found[k] for k, (a, *b) in parts.items()}


def assert_equal(a, b):
    assert a.keys() == b.keys() and a
    for key in a:
        np.testing.assert_array_equal(a[key], b[key], err_msg=key)


def largest_difference(a, b):
    assert a.keys() == b.keys() and a
    return max(np.abs(a[key] - b[key]).max() / max(np.abs(b[key]).max(), 1e-3) for key in a)


def write_keras_trace(path):
    """Writes a trace of the same network in Keras' layouts, with weights drawn at random."""
    random = np.random.default_rng(0)
    about = {
        **{"format": "lockstep trace", "version": 2, "framework": "keras", "steps": [0]},
        **{"num_replicas": 1, "replicas": [0], "optimizer": {"class": "AdamW"}},
        "variables": [
            {"name": name, "kind": kind, "layout": layout}
            for name, (kind, layout, _) in KERAS_VARIABLES.items()
        ],
    }
    arrays = {
        f"1/before/0/{i}": random.uniform(0.5, 1, shape).astype(np.float32)
        for i, (_, _, shape) in enumerate(KERAS_VARIABLES.values())
    }
    trace_file.save(trace_file.from_parts(about | {"gradients": []}, arrays), path)


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """Returns a function that trains with one or two processes; it returns folder and results."""

    @functools.cache
    def run(framework, kind):
        folder = tmp_path_factory.mktemp(kind)
        write_keras_trace(folder / "keras.npz")
        paths = [ROOT] + [SCRIPTS / "stand_in"] * (framework == "stand-in")
        python = PYTHON if framework == "torch" else sys.executable
        done = subprocess.run(
            [python, str(SCRIPTS / "torch_cases.py"), str(folder), kind],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths))},
            capture_output=True,
            text=True,
            timeout=400,
            check=False,
        )
        assert done.returncode == 0, done.stderr[-3000:]
        if kind == "one":
            assert "exception.npz: the training ended before steps [2]" in done.stderr
        results = sorted(folder.glob(f"results.{kind}.*.json"))
        return folder, [json.loads(path.read_text()) for path in results]

    return run


@pytest.fixture(params=FRAMEWORKS)
def one(request, recorded):
    return recorded(request.param, "one")


@pytest.fixture(params=FRAMEWORKS)
def two(request, recorded):
    return recorded(request.param, "two")


# --- One process -----------------------------------------------------------------------------


def test_a_trace_has_the_members_of_the_format(one):
    trace = Trace(one[0], "format")
    about = trace.about
    assert (about["format"], about["version"], about["framework"]) == ("lockstep trace", 2, "torch")
    assert (about["num_replicas"], about["replicas"], about["steps"]) == (1, [0], [0, 2])
    assert (about["reduction"], about["order"], about["wrapper"]) == ("", "reduce, clip", "")
    assert (about["data_layout"], about["permuted"], about["replayed"]) == ("NCHW", None, None)
    assert about["micro_batches"] == [1, 1]
    weights = ["0.weight", "0.bias", "1.weight", "1.bias", "4.weight", "4.bias"]
    assert about["gradients"] == weights
    described = {v["name"]: v for v in about["variables"]}
    assert described["0.weight"] == {"name": "0.weight", "kind": "weight", "layout": "OIHW"}
    assert described["4.weight"]["layout"] == "OI" and described["4.bias"]["layout"] == ""
    assert described["1.num_batches_tracked"]["kind"] == "statistic"
    assert described["4.bias/exp_avg"] == {
        **{"name": "4.bias/exp_avg", "kind": "optimizer state", "layout": ""},
        **{"of": "4.bias", "slot": "exp_avg"},
    }
    kinds = {key.split("/")[1] for key in trace.arrays}
    assert kinds == {"data", "random", "random_after", "loss", "raw", "clipped", "before", "after"}
    assert {key.split("/")[0] for key in trace.arrays} == {"1", "2"}
    convolution, norm, dropout, dense = about["layers"]
    assert convolution["class"] == "Conv2d" and convolution["weights"] == ["0.weight", "0.bias"]
    assert (convolution["strides"], convolution["padding"]) == ([2, 2], [0, 0])
    assert (norm["class"], norm["epsilon"], norm["momentum"]) == ("BatchNorm2d", 1e-5, 0.1)
    assert "1.running_var" in norm["weights"]
    assert (dropout["class"], dropout["rate"]) == ("Dropout", 0.3)
    assert dense == {"name": "4", "class": "Linear", "weights": ["4.weight", "4.bias"]}
    assert about["optimizer"]["class"] == "AdamW" and about["optimizer"]["framework"] == "torch"
    first, last = about["settings"]
    assert [group["learning_rate"] for group in first] == [0.01, 0.5]
    assert [group["learning_rate"] for group in last] == [0.0025, 0.125]
    assert first[0]["weights"] == ["0.weight", "0.bias"]
    expected = {"beta_1": 0.8, "beta_2": 0.99, "epsilon": 1e-8, "weight_decay": 0.1}
    assert expected.items() <= first[1].items() and first[1]["amsgrad"] is False


def test_arrays_are_those_of_the_training(one):
    trace = Trace(one[0], "format")
    assert trace.kind("data")["0"].shape == (12, 1, 8, 8)
    assert trace.kind("random")["0"].dtype == np.uint8
    assert not np.array_equal(trace.kind("random")["0"], trace.kind("random_after")["0"])
    assert trace.kind("loss")["0"].shape == () and trace.kind("loss")["0"] > 0
    assert_equal(trace.kind("raw"), trace.kind("clipped"))  # Nothing is clipped in this training.
    before, after = trace.kind("before"), trace.kind("after")
    assert "0.weight/step" not in before and after["0.weight/step"] == 1
    assert trace.kind("before", 2)["0.weight/step"] == 2
    assert (before["1.num_batches_tracked"], after["1.num_batches_tracked"]) == (0, 1)
    gradient = trace.kind("clipped")["4.bias"]
    np.testing.assert_allclose(after["4.bias/exp_avg"], 0.2 * gradient, rtol=1e-6)
    expected = before["4.bias"] * (1 - 0.5 * 0.1) - 0.5 * np.sign(gradient)
    np.testing.assert_allclose(after["4.bias"], expected, rtol=1e-4)
    first = Trace(one[0], "first")
    norm = sum(np.square(x, dtype=float).sum() for x in first.kind("clipped").values())
    assert norm**0.5 <= 0.5 + 1e-6 < sum(map(np.linalg.norm, first.kind("raw").values()))


def test_recording_changes_no_bits_and_leaves_nothing_behind(one):
    folder, [results] = one
    assert all(results["bits"].values()) and results["compiled"] is True
    assert results["format"] == {"hooks": 0, "is_restored": True}
    assert results["nested"] is True
    assert [Trace(folder, f"nested{i}").about["steps"] for i in (0, 1)] == [[0], [1]]
    assert not list(folder.glob("*.tmp"))
    compiled = Trace(folder, "compiled")
    assert compiled.about["gradients"][0] == "0.weight" and compiled.kind("data")
    assert results["exception"] == "out of memory"  # What was recorded before is written.
    assert Trace(folder, "exception").about["steps"] == [0, 1]


def test_replay_is_exact_to_the_bit(one):
    first, again = Trace(one[0], "first"), Trace(one[0], "again")
    assert again.about["replayed"] == "first.npz"
    assert_equal(first.arrays, again.arrays)
    assert_equal(first.arrays, Trace(one[0], "of_rank").arrays)
    assert_equal(Trace(one[0], "random").arrays, Trace(one[0], "random_again").arrays)
    assert_equal(Trace(one[0], "bfloat16").arrays, Trace(one[0], "bfloat16_again").arrays)
    assert Trace(one[0], "bfloat16").kind("after")["weight"].dtype == np.float32
    verdict = compare(one[0] / "first.npz", one[0] / "again.npz")
    assert not verdict.findings and {"update", "gradients"} <= {*verdict.checked}


def test_permuted_examples_change_rounding_only(one):
    first, permuted = Trace(one[0], "first"), Trace(one[0], "permuted")
    assert permuted.about["permuted"] == 1
    for step in (0, 1, 3):
        assert_equal(first.kind("before", step), permuted.kind("before", step))
        a, b = first.kind("data", step)["0"], permuted.kind("data", step)["0"]
        assert not np.array_equal(a, b)
        np.testing.assert_array_equal(np.sort(a.sum((1, 2, 3))), np.sort(b.sum((1, 2, 3))))
        a, b = first.kind("raw", step), permuted.kind("raw", step)
        del a["0.bias"], b["0.bias"]  # Before BatchNorm, it is rounding only.
        assert largest_difference(a, b) < 1e-5
        np.testing.assert_allclose(
            first.kind("loss", step)["0"], permuted.kind("loss", step)["0"], rtol=1e-6
        )


def test_state_of_another_optimizer_is_loaded_where_it_has_the_same_slots(one):
    adam, adamw = Trace(one[0], "adam"), Trace(one[0], "adam_adamw")
    assert_equal(adam.kind("before", 2), adamw.kind("before", 2))
    weights = set(adam.about["gradients"])
    sgd, other = Trace(one[0], "sgd").kind("before", 2), Trace(one[0], "sgd_adamw")
    assert all(np.array_equal(sgd[x], other.kind("before", 2)[x]) for x in weights)
    assert "0.weight/exp_avg" in other.kind("before", 2)


def test_weights_in_layouts_of_keras_are_transposed_and_matched_by_names_if_given(one):
    other = np.load(one[0] / "keras.npz")
    arrays = [other[f"1/before/0/{i}"] for i in range(len(KERAS_VARIABLES))]
    for name in ("port", "port_names"):
        before = Trace(one[0], name).kind("before")
        np.testing.assert_array_equal(before["0.weight"], arrays[0].transpose(3, 2, 0, 1))
        np.testing.assert_array_equal(before["4.weight"], arrays[4].T)
        of_norm = {"weight": 2, "bias": 3, "running_mean": 6, "running_var": 7}
        for leaf, index in of_norm.items():
            np.testing.assert_array_equal(before[f"1.{leaf}"], arrays[index])
    swapped = Trace(one[0], "swapped").kind("before")
    np.testing.assert_array_equal(before["1.weight"], swapped["1.bias"])
    np.testing.assert_array_equal(before["1.bias"], swapped["1.weight"])
    np.testing.assert_array_equal(before["0.bias"], swapped["0.bias"])


def test_weights_without_a_gradient_have_no_array_and_sparse_ones_stay_sparse(one):
    trace = Trace(one[0], "no_gradient")
    assert set(trace.kind("raw")) == set(trace.kind("clipped")) == {"used.weight", "used.bias"}
    assert {"unused.weight", "frozen.weight"} <= set(trace.kind("after"))
    raw = Trace(one[0], "sparse").kind("raw")
    assert sorted(raw["0.weight/indices"].tolist()) == [1, 2, 2, 7]
    assert raw["0.weight/values"].shape == (4, 3) and raw["0.weight/rows"] == 10
    assert "0.weight" not in raw


def test_a_step_is_what_ends_with_an_update(one):
    folder, [results] = one
    skipped = Trace(folder, "skipped")  # As by a GradScaler: it begins again.
    assert skipped.about["micro_batches"] == [1, 1] and skipped.about["steps"] == [0, 1]
    assert skipped.kind("data", 1).keys() == {"0"}
    trace = Trace(folder, "accumulation")
    assert trace.about["micro_batches"] == [2]
    assert set(trace.kind("data")) == set(trace.kind("random")) == {"0", "1"}
    assert not np.array_equal(trace.kind("data")["0"], trace.kind("data")["1"])
    assert_equal(trace.kind("raw"), trace.kind("clipped"))
    np.testing.assert_allclose(trace.kind("loss")["0"], results["accumulation"], rtol=1e-6)
    loss = Trace(folder, "two_models").kind("loss")["0"]  # Not that of the other model.
    np.testing.assert_allclose(loss, results["two_models"], rtol=1e-6)


ERRORS = {
    "data parallel": "model: DataParallel cannot be recorded; use DDP or fully_shard",
    "closure": "optimizer.step: a closure cannot be recorded; call it without",
    "other model": "optimizer: updates weights that model does not have; pass their model",
    "steps": "steps=[-1]: must be numbers from 0",
    "no steps": "steps=0: must be numbers from 0",
    "suffix": "x.npy: must be an .npz file in a folder that exists",
    "folder": "nowhere/x.npz: must be an .npz file in a folder that exists",
    "missing step": "replay=first.npz: does not have steps {9}; record them there",
    "no trace": "replay=absent.npz: cannot be read as a trace",
    "later": "replay=later.npz: cannot be read as a trace: version 3, this file",
    "damaged": "replay=damaged.npz: cannot be read as a trace",
    "unmatched": "replay: weight (5, 7) is not matched by 0.weight (4, 1, 2, 2)",
    "misnamed": "replay: 1.bias (4,) is not matched by 4.weight (5, 64); pass names",
    "evaluation": "replay: no forward pass was seen",
}


def test_errors_are_one_line(one):
    messages = one[1][0]["errors"]
    assert messages.keys() == ERRORS.keys()
    for error, text in ERRORS.items():
        assert messages[error].startswith(text) and "\n" not in messages[error]


# --- Two processes ---------------------------------------------------------------------------


def test_ddp_is_recorded_by_each_rank_and_replayed_to_the_bit(two):
    folder, results = two
    trace = Trace(folder, "ddp")
    assert [about["replicas"] for about in trace.abouts] == [[0], [1]]
    assert trace.about["num_replicas"] == 2 and trace.about["reduction"] == "mean"
    assert trace.about["wrapper"] == "DistributedDataParallel"
    permuted = Trace(folder, "ddp_permuted")
    for step in range(3):
        raw = [trace.kind("raw", step, replica) for replica in range(2)]
        mean = {name: (raw[0][name] + raw[1][name]) / 2 for name in raw[0]}
        for replica in range(2):
            assert_equal(trace.kind("sums", step, replica), mean)
        assert_equal(trace.kind("clipped", step), trace.kind("clipped", step, 1))
        norm = sum(np.square(x, dtype=float).sum() for x in trace.kind("clipped", step).values())
        assert norm**0.5 <= 0.5 + 1e-6
        a, b = (trace.kind("data", step, replica)["0"] for replica in range(2))
        assert len(a) == len(b) == 6 and not np.array_equal(a, b)
        assert not np.array_equal(trace.kind("data", step)["0"], permuted.kind("data", step)["0"])
        a, b = trace.kind("sums", step), permuted.kind("sums", step)
        del a["0.bias"], b["0.bias"]  # Before BatchNorm, it is rounding only.
        assert largest_difference(a, b) < 1e-5
    assert_equal(trace.arrays, Trace(folder, "ddp_again").arrays)
    assert all(result["ddp"] is True for result in results)  # The bits without a recording.
    assert compare(folder / "ddp.npz").ok


def test_what_bypasses_ddp_has_no_sums_and_is_named(two):
    trace = Trace(two[0], "bypass")
    assert not trace.kind("sums", 0) and trace.kind("sums", 1)
    assert_equal(trace.kind("raw", 0), trace.kind("clipped", 0))
    faults = compare(two[0] / "bypass.npz").faults
    assert [(f.stage, f.cause) for f in faults] == [
        ("clipping", "clipped_on_one_replica"),
        ("all-reduce", "not_all_reduced"),
    ]


def test_gradients_accumulated_without_synchronisation_are_sent_once(two):
    trace = Trace(two[0], "no_sync")
    assert trace.about["micro_batches"] == [2, 2] and len(trace.kind("data")) == 2
    assert trace.kind("raw", 1) and not trace.kind("sums", 1)  # A step that never sends.
    raw = [trace.kind("raw", 0, replica) for replica in range(2)]
    mean = {name: (raw[0][name] + raw[1][name]) / 2 for name in raw[0]}
    assert largest_difference(trace.kind("sums"), mean) < 1e-6


def test_fsdp_is_recorded_without_raw_gradients(two):
    folder, results = two
    assert all(result["fsdp"] is True for result in results)
    trace, ddp = Trace(folder, "fsdp"), Trace(folder, "ddp")
    assert trace.about["wrapper"] == "fully_shard" and trace.about["reduction"] == ""
    assert not trace.kind("raw") and trace.kind("before")["4.weight"].shape == (5, 64)
    assert_equal(trace.arrays, Trace(folder, "fsdp_again").arrays)
    replayed = Trace(folder, "ddp_fsdp")
    for step in range(3):
        sums, expected = replayed.kind("sums", step), ddp.kind("sums", step)
        del sums["0.bias"], expected["0.bias"]
        assert largest_difference(sums, expected) < 1e-5
        assert_equal(ddp.kind("before", step), replayed.kind("before", step))


def test_a_mesh_with_other_axes_than_data_is_refused(two):
    for result in two[1]:
        assert len(result["other_meshes"]) == 3
        for message in result["other_meshes"]:
            assert message == (
                "model: 0.weight is split over a mesh with other axes than data, such as tensor"
                " parallelism; record a model with DDP, or fully_shard over all processes"
            )
