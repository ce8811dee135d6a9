"""The recorder of PyTorch: its files hold what was trained, and recording changes nothing.

PyTorch runs in processes of an interpreter that has it: the one of the tests, or the one that
`LOCKSTEP_TORCH_PYTHON` names.
"""

import ast
import importlib.util
import json
import os
import pathlib
import shutil
import subprocess
import sys

import numpy as np
import pytest
from recorder_scripts import torch_bugs

ROOT = pathlib.Path(__file__).parent.parent
SCRIPTS = ROOT / "tests/recorder_scripts"
RECORDER = ROOT / "recorders/lockstep_torch.py"
PYTHON = os.environ.get("LOCKSTEP_TORCH_PYTHON") or (
    sys.executable if importlib.util.find_spec("torch") else ""
)
needs_torch = pytest.mark.skipif(not PYTHON, reason="needs PyTorch (LOCKSTEP_TORCH_PYTHON)")

KERAS_VARIABLES = {
    "conv/kernel": ("weight", "HWIO", (3, 3, 1, 4)),
    "conv/bias": ("weight", "", (4,)),
    "bn/gamma": ("weight", "", (4,)),
    "bn/beta": ("weight", "", (4,)),
    "dense/kernel": ("weight", "IO", (64, 5)),
    "dense/bias": ("weight", "", (5,)),
    "bn/moving_mean": ("statistic", "", (4,)),
    "bn/moving_variance": ("statistic", "", (4,)),
}


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
        **{"format": "lockstep trace", "version": 1, "framework": "keras", "steps": [0]},
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
    np.savez(path, about=np.array(json.dumps(about)), **arrays)


def run_cases(folder, kind):
    """Returns the folder of traces and the results of each process."""
    shutil.copy(RECORDER, folder)
    shutil.copy(SCRIPTS / "torch_cases.py", folder)
    write_keras_trace(folder / "keras.npz")
    command = [PYTHON, "-W", "ignore", "torch_cases.py", ".", kind]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr[-3000:]
    paths = sorted(folder.glob(f"results.{kind}.*.json"))
    return folder, [json.loads(path.read_text()) for path in paths]


@pytest.fixture(scope="module")
def one(tmp_path_factory):
    return run_cases(tmp_path_factory.mktemp("one"), "one")


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    return run_cases(tmp_path_factory.mktemp("two"), "two")


# --- The file of the recorder ----------------------------------------------------------------


def test_the_recorder_is_one_short_file_that_needs_torch_and_numpy_only():
    text = RECORDER.read_text()
    nodes = list(ast.walk(ast.parse(text)))
    modules = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    modules |= {node.module for node in nodes if isinstance(node, ast.ImportFrom)}
    others = {name.split(".")[0] for name in modules} - set(sys.stdlib_module_names)
    assert others == {"torch", "numpy"}
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef)
    texts = [ast.get_docstring(node, clean=False) for node in nodes if isinstance(node, documented)]
    num_documentation = sum(len(x.splitlines()) for x in texts if x)
    num_code = sum(bool(line.strip()) for line in text.splitlines()) - num_documentation
    assert num_code <= 292


# --- One process -----------------------------------------------------------------------------


@needs_torch
def test_a_trace_has_the_members_of_the_format(one):
    trace = Trace(one[0], "format")
    about = trace.about
    assert (about["format"], about["version"], about["framework"]) == ("lockstep trace", 1, "torch")
    assert (about["num_replicas"], about["replicas"], about["steps"]) == (1, [0], [0, 2])
    assert (about["reduction"], about["order"], about["wrapper"]) == ("", "reduce, clip", "")
    assert (about["data_layout"], about["permuted"], about["replayed"]) == ("NCHW", None, None)
    assert about["micro_batches"] == [1, 1]
    weights = ["0.weight", "0.bias", "1.weight", "1.bias", "5.weight", "5.bias"]
    assert about["gradients"] == weights
    described = {v["name"]: v for v in about["variables"]}
    assert described["0.weight"] == {"name": "0.weight", "kind": "weight", "layout": "OIHW"}
    assert described["5.weight"]["layout"] == "OI" and described["5.bias"]["layout"] == ""
    assert described["1.num_batches_tracked"]["kind"] == "statistic"
    assert described["5.bias/exp_avg"] == {
        **{"name": "5.bias/exp_avg", "kind": "optimizer state", "layout": ""},
        **{"of": "5.bias", "slot": "exp_avg"},
    }
    kinds = {key.split("/")[1] for key in trace.arrays}
    assert kinds == {"data", "random", "random_after", "loss", "raw", "clipped", "before", "after"}
    assert {key.split("/")[0] for key in trace.arrays} == {"1", "2"}


@needs_torch
def test_arrays_are_those_of_the_training(one):
    folder, [results] = one
    trace = Trace(folder, "format")
    assert trace.kind("data")["0"].shape == (12, 1, 8, 8)
    assert trace.kind("random")["0"].dtype == np.uint8
    assert trace.kind("loss")["0"].shape == () and trace.kind("loss")["0"] > 0
    assert_equal(trace.kind("raw"), trace.kind("clipped"))  # Nothing is clipped in this training.
    before, after = trace.kind("before"), trace.kind("after")
    assert "0.weight/step" not in before and after["0.weight/step"] == 1
    assert trace.kind("before", 2)["0.weight/step"] == 2
    assert (before["1.num_batches_tracked"], after["1.num_batches_tracked"]) == (0, 1)
    gradient = trace.kind("clipped")["5.bias"]
    np.testing.assert_allclose(after["5.bias/exp_avg"], 0.2 * gradient, rtol=1e-6)
    expected = before["5.bias"] * (1 - 0.5 * 0.1) - 0.5 * np.sign(gradient)
    np.testing.assert_allclose(after["5.bias"], expected, rtol=1e-4)
    final = [np.array(x) for x in results["format"]["after"]]
    assert not np.array_equal(final[0], trace.kind("after", 2)["0.weight"])  # Step 3 follows.


@needs_torch
def test_settings_of_each_step_are_under_names_of_keras(one):
    about = Trace(one[0], "format").about
    assert about["optimizer"]["class"] == "AdamW" and about["optimizer"]["framework"] == "torch"
    first, last = about["settings"]
    assert [group["learning_rate"] for group in first] == [0.01, 0.5]
    assert [group["learning_rate"] for group in last] == [0.0025, 0.125]
    assert first[0]["weights"] == ["0.weight", "0.bias"]
    expected = {"beta_1": 0.8, "beta_2": 0.99, "epsilon": 1e-8, "weight_decay": 0.1}
    assert expected.items() <= first[1].items() and first[1]["amsgrad"] is False


@needs_torch
def test_layers_have_the_settings_that_ports_get_wrong(one):
    convolution, norm, dropout, dense = Trace(one[0], "format").about["layers"]
    assert convolution["class"] == "Conv2d" and convolution["weights"] == ["0.weight", "0.bias"]
    assert (convolution["strides"], convolution["padding"]) == ([2, 2], [1, 1])
    assert convolution["dilation"] == [1, 1]
    assert (norm["class"], norm["epsilon"], norm["momentum"]) == ("BatchNorm2d", 1e-5, 0.1)
    assert "1.running_var" in norm["weights"]
    assert (dropout["class"], dropout["rate"]) == ("Dropout", 0.3)
    assert dense == {"name": "5", "class": "Linear", "weights": ["5.weight", "5.bias"]}


@needs_torch
def test_recording_changes_no_bits_and_leaves_nothing_behind(one):
    folder, [results] = one
    assert results["bits"] is True and results["compiled"] is True
    assert results["format"]["hooks"] == 0 and results["format"]["is_restored"]
    assert results["nested"] == "torch.autograd"
    assert not list(folder.glob("*.tmp"))
    compiled = Trace(folder, "compiled")
    assert compiled.about["gradients"][0] == "0.weight" and compiled.kind("data")


@needs_torch
def test_replay_is_exact_to_the_bit(one):
    first, again = Trace(one[0], "first"), Trace(one[0], "again")
    assert again.about["replayed"] == "first.npz"
    assert_equal(first.arrays, again.arrays)
    assert_equal(Trace(one[0], "random").arrays, Trace(one[0], "random_again").arrays)


@needs_torch
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
        assert 0 < largest_difference(a, b) < 1e-5
        np.testing.assert_allclose(
            first.kind("loss", step)["0"], permuted.kind("loss", step)["0"], rtol=1e-6
        )


@needs_torch
def test_state_of_another_optimizer_is_loaded_where_it_has_the_same_slots(one):
    adam, adamw = Trace(one[0], "adam"), Trace(one[0], "adam_adamw")
    assert_equal(adam.kind("before", 2), adamw.kind("before", 2))
    weights = set(adam.about["gradients"])
    sgd, other = Trace(one[0], "sgd").kind("before", 2), Trace(one[0], "sgd_adamw")
    assert all(np.array_equal(sgd[x], other.kind("before", 2)[x]) for x in weights)
    assert "0.weight/exp_avg" in other.kind("before", 2)


@needs_torch
@pytest.mark.parametrize("name", ["port", "port_names"])
def test_weights_in_layouts_of_keras_are_transposed(one, name):
    other, before = np.load(one[0] / "keras.npz"), Trace(one[0], name).kind("before")
    arrays = [other[f"1/before/0/{i}"] for i in range(len(KERAS_VARIABLES))]
    np.testing.assert_array_equal(before["0.weight"], arrays[0].transpose(3, 2, 0, 1))
    np.testing.assert_array_equal(before["5.weight"], arrays[4].T)
    for name, index in {
        "1.weight": 2,
        "1.bias": 3,
        "1.running_mean": 6,
        "1.running_var": 7,
    }.items():
        np.testing.assert_array_equal(before[name], arrays[index])


@needs_torch
def test_weights_are_matched_by_names_that_are_given(one):
    straight, swapped = (Trace(one[0], name).kind("before") for name in ("port", "swapped"))
    np.testing.assert_array_equal(straight["1.weight"], swapped["1.bias"])
    np.testing.assert_array_equal(straight["1.bias"], swapped["1.weight"])
    np.testing.assert_array_equal(straight["0.bias"], swapped["0.bias"])


@needs_torch
def test_weights_without_a_gradient_have_no_array(one):
    trace = Trace(one[0], "no_gradient")
    assert set(trace.kind("raw")) == set(trace.kind("clipped")) == {"used.weight", "used.bias"}
    assert {"unused.weight", "frozen.weight"} <= set(trace.kind("after"))


@needs_torch
def test_sparse_gradients_stay_sparse(one):
    trace = Trace(one[0], "sparse")
    raw = trace.kind("raw")
    assert sorted(raw["0.weight/indices"].tolist()) == [1, 2, 2, 7]
    assert raw["0.weight/values"].shape == (4, 3) and raw["0.weight/rows"] == 10
    assert "0.weight" not in raw and "2.weight" in raw


@needs_torch
def test_bfloat16_is_kept_in_float32(one):
    trace = Trace(one[0], "bfloat16")
    assert trace.kind("after")["weight"].dtype == np.float32
    assert_equal(trace.arrays, Trace(one[0], "bfloat16_again").arrays)


@needs_torch
def test_a_step_that_the_scaler_skips_begins_again(one):
    trace = Trace(one[0], "scaler")
    assert trace.about["micro_batches"] == [1, 1]
    scaled, applied = trace.kind("raw")["5.bias"], trace.kind("clipped")["5.bias"]
    np.testing.assert_array_equal(scaled, applied * 65536)
    assert np.isfinite(trace.kind("raw", 1)["5.bias"]).all()


@needs_torch
def test_accumulated_batches_are_one_step(one):
    trace = Trace(one[0], "accumulation")
    assert trace.about["micro_batches"] == [2]
    assert set(trace.kind("data")) == set(trace.kind("random")) == {"0", "1"}
    assert not np.array_equal(trace.kind("data")["0"], trace.kind("data")["1"])
    assert_equal(trace.kind("raw"), trace.kind("clipped"))
    assert 1 < trace.kind("loss")["0"] < 3  # Two halves of a cross-entropy of five classes.


@needs_torch
def test_the_loss_of_another_model_is_not_recorded(one):
    folder, [results] = one
    loss = Trace(folder, "two_models").kind("loss")["0"]
    np.testing.assert_allclose(loss, results["two_models"], rtol=1e-6)


@needs_torch
def test_what_was_recorded_is_written_when_the_block_raises(one):
    folder, [results] = one
    assert results["exception"] == "out of memory"
    assert Trace(folder, "exception").about["steps"] == [0, 1]
    assert Trace(folder, "nested0").about["steps"] == [0]
    assert Trace(folder, "nested1").about["steps"] == [1]


@needs_torch
@pytest.mark.parametrize(
    "error, text",
    {
        "data parallel": "model: DataParallel cannot be recorded; use DDP or fully_shard",
        "closure": "optimizer.step: a closure cannot be recorded; call it without",
        "other model": "optimizer: updates weights that model does not have; pass their model",
        "steps": "steps=[-1]: must be numbers from 0",
        "no steps": "steps=0: must be numbers from 0",
        "suffix": "x.npy: must be an .npz file in a folder that exists",
        "folder": "nowhere/x.npz: must be an .npz file in a folder that exists",
        "missing step": "replay=first.npz: does not have steps {9}; record them there",
        "no trace": "replay=absent.npz: cannot be read as a trace",
        "later": "replay=later.npz: cannot be read as a trace: version 2, this file",
        "damaged": "replay=damaged.npz: cannot be read as a trace",
        "unmatched": "replay: weight (3, 7) is not matched by 0.weight (4, 1, 3, 3)",
        "misnamed": "replay: 1.bias (4,) is not matched by 5.weight (5, 64); pass names",
        "evaluation": "replay: no forward pass was seen",
    }.items(),
)
def test_errors_are_one_line(one, error, text):
    message = one[1][0]["errors"][error]
    assert message.startswith(text) and "\n" not in message


# --- Two processes ---------------------------------------------------------------------------


@needs_torch
def test_ddp_is_recorded_by_each_rank(two):
    trace = Trace(two[0], "ddp")
    assert [about["replicas"] for about in trace.abouts] == [[0], [1]]
    assert trace.about["num_replicas"] == 2 and trace.about["reduction"] == "mean"
    assert trace.about["wrapper"] == "DistributedDataParallel"
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


@needs_torch
def test_replay_with_ddp_is_exact_to_the_bit(two):
    assert_equal(Trace(two[0], "ddp").arrays, Trace(two[0], "ddp_again").arrays)


@needs_torch
def test_permuted_examples_of_ddp_change_rounding_only(two):
    trace, permuted = Trace(two[0], "ddp"), Trace(two[0], "ddp_permuted")
    for step in range(3):
        assert not np.array_equal(trace.kind("data", step)["0"], permuted.kind("data", step)["0"])
        a, b = trace.kind("sums", step), permuted.kind("sums", step)
        del a["0.bias"], b["0.bias"]  # Before BatchNorm, it is rounding only.
        assert 0 < largest_difference(a, b) < 1e-5


@needs_torch
def test_recording_ddp_changes_no_bits(two):
    assert all(results["ddp_bits"] == [True, True, True] for results in two[1])


@needs_torch
def test_a_forward_pass_that_bypasses_ddp_has_no_sums(two):
    trace = Trace(two[0], "bypass")
    assert not trace.kind("sums", 0) and trace.kind("sums", 1)
    for replica in range(2):
        assert_equal(trace.kind("raw", 0, replica), trace.kind("clipped", 0, replica))
    assert not np.array_equal(*(trace.kind("clipped", 0, i)["5.bias"] for i in range(2)))


@needs_torch
def test_gradients_accumulated_without_synchronisation_are_sent_once(two):
    trace = Trace(two[0], "no_sync")
    assert trace.about["micro_batches"] == [2, 2] and len(trace.kind("data")) == 2
    assert trace.kind("raw", 1) and not trace.kind("sums", 1)  # A step that never sends.
    raw = [trace.kind("raw", 0, replica) for replica in range(2)]
    mean = {name: (raw[0][name] + raw[1][name]) / 2 for name in raw[0]}
    assert largest_difference(trace.kind("sums"), mean) < 1e-6


@needs_torch
def test_weights_unused_by_one_rank_have_sums_on_both(two):
    trace = Trace(two[0], "unused")
    assert "b.weight" not in trace.kind("raw") and "b.weight" in trace.kind("raw", 0, 1)
    np.testing.assert_array_equal(
        trace.kind("sums")["b.weight"], trace.kind("raw", 0, 1)["b.weight"] / 2
    )
    assert sorted(trace.kind("sums")["a.weight/indices"].tolist()) == [0, 1, 5]


@needs_torch
def test_fsdp_is_recorded_without_raw_gradients(two):
    folder, results = two
    assert all(result["fsdp"] is True for result in results)
    trace, ddp = Trace(folder, "fsdp"), Trace(folder, "ddp")
    assert trace.about["wrapper"] == "fully_shard" and trace.about["reduction"] == ""
    assert not trace.kind("raw") and trace.kind("before")["5.weight"].shape == (5, 64)
    assert_equal(trace.arrays, Trace(folder, "fsdp_again").arrays)
    replayed = Trace(folder, "ddp_fsdp")
    for step in range(3):
        sums = replayed.kind("sums", step)
        assert largest_difference(sums, ddp.kind("sums", step)) < 1e-5
        assert_equal(ddp.kind("before", step), replayed.kind("before", step))


# --- A script that knows nothing of the recorder ---------------------------------------------


@pytest.fixture(scope="module")
def script(tmp_path_factory):
    """Returns a function that records the script, patched as its user would patch it."""
    if not os.environ.get("FASHION_MNIST_DIR"):
        pytest.skip("needs Fashion-MNIST (FASHION_MNIST_DIR)")
    folder = tmp_path_factory.mktemp("script")
    shutil.copy(RECORDER, folder)
    shutil.copy(SCRIPTS / "torch_ddp.py", folder)
    patch = ["patch", "-p1", "-i", str(SCRIPTS / "torch_ddp.diff")]
    subprocess.run(patch, cwd=folder, check=True, capture_output=True)
    text = (folder / "torch_ddp.py").read_text()

    def run(name, num_processes, bug="", **environment):
        (folder / "run.py").write_text(torch_bugs.apply_bug(text, bug) if bug else text)
        command = [PYTHON, "-m", "torch.distributed.run", "--standalone"]
        command += [f"--nproc_per_node={num_processes}", "run.py"]
        threads = {"OMP_NUM_THREADS": "1", "NUM_EXAMPLES": "416", "TRACE": f"{name}.npz"}
        done = subprocess.run(
            command,
            cwd=folder,
            env={**os.environ, **threads, **environment},
            capture_output=True,
            text=True,
            timeout=200,
        )
        assert done.returncode == 0, done.stderr[-3000:]
        return Trace(folder, name)

    return run


@pytest.fixture(scope="module")
def recorded_one(script):
    return script("one", 1)


def test_the_patch_of_the_script_is_short():
    lines = (SCRIPTS / "torch_ddp.diff").read_text().splitlines()
    changed = [x for x in lines if x[:1] in "+-" and x[:3] not in ("+++", "---")]
    assert 0 < len(changed) < 10
    assert "lockstep" not in (SCRIPTS / "torch_ddp.py").read_text()


@needs_torch
@pytest.mark.e2e
def test_one_and_two_processes_are_the_same_training(script, recorded_one):
    one, two = recorded_one, script("two", 2, REPLAY="one.npz")
    assert one.about["steps"] == two.about["steps"] == [0, 1, 2, 4, 5]
    for step in one.about["steps"]:
        a, b = one.kind("clipped", step), two.kind("clipped", step)
        for name in ("0.bias", "3.bias"):  # Before BatchNorm, they are rounding only.
            del a[name], b[name]
        assert largest_difference(a, b) < 1e-4
        whole = one.kind("data", step)["0"]
        shards = np.concatenate([two.kind("data", step, replica)["0"] for replica in range(2)])
        assert len(whole) == len(shards) == (32 if step == 4 else 96)
        assert {x.tobytes() for x in whole} == {x.tobytes() for x in shards}


@needs_torch
@pytest.mark.e2e
@pytest.mark.slow
@pytest.mark.parametrize("bug", torch_bugs.BUGS)
def test_bugs_show_in_the_trace(script, recorded_one, bug):
    one, two = recorded_one, script(bug, 2, bug, REPLAY="one.npz")
    step = 5 if bug == "no_set_epoch" else 0
    gradients, others = one.kind("clipped", step), two.kind("clipped", step)
    has_equal_gradients = np.allclose(gradients["7.bias"], others["7.bias"], rtol=1e-3)
    assert has_equal_gradients == (bug in ("clipped_on_one_rank", "scaled_learning_rate"))
    assert bool(two.kind("sums")) == (bug != "bypassed_ddp")
    replicas = [two.kind("clipped", 0, replica)["7.bias"] for replica in range(2)]
    is_equal = np.array_equal(*replicas)
    assert is_equal == (bug not in ("bypassed_ddp", "clipped_on_one_rank"))
    rates = [x.about["settings"][0][0]["learning_rate"] for x in (one, two)]
    assert (rates == [0.1, 0.2]) == (bug == "scaled_learning_rate")
    sizes = [len(two.kind("data", 0, replica)["0"]) for replica in range(2)]
    assert sizes == ([72, 24] if bug == "unequal_shards" else [48, 48])
