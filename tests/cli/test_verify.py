"""`verify` and `--inject` as a user runs them: verdicts, exit codes, files and figures."""

import dataclasses
import json
import re

import numpy as np
import pytest
from PIL import Image

from app.records.caveats import DATASET_CAVEATS
from app.records.checkpoint import find_newest_checkpoint
from app.records.history import load_history, load_summary
from app.verification.comparison import compare_traces
from app.verification.strategies import shards_of_single
from lockstep.context import Context
from lockstep.data.file import load as load_trace
from lockstep.data.trace import STATISTIC, WEIGHT, About, Shard, Trace, Variable
from lockstep.run import Proven, check_steps, exact_shards
from models import MODELS
from tests.conftest import run_main
from tests.in_process import run_here, run_here_ok
from tests.verifier.script_samples import Script

SMALL = [
    "--allow_unverified_data", "--device=cpu", "--num_devices=2", "--global_batch_size=15",
    "--num_train_examples=40", "--learning_rate=0.05",  # Batches of 15, 15 and 10.
]  # fmt: skip


@pytest.fixture(autouse=True)
def _small(small_data, small_lenet, monkeypatch):
    monkeypatch.setenv("FASHION_MNIST_DIR", str(small_data))


@pytest.fixture(scope="module")
def clean(tmp_path_factory, small_data):
    """All strategies over an epoch, whose last batch is short."""
    out = tmp_path_factory.mktemp("verify") / "run"
    env = {"FASHION_MNIST_DIR": str(small_data)}
    arguments = ["verify", *SMALL, "--steps=3", "--keep_traces", f"--out={out}"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(MODELS, "lenet", "tests.dense_network:build_dense_network")
        return out, run_here_ok(*arguments, env=env)


def load(out):
    return json.loads((out / "verify.json").read_text(encoding="utf-8"))


BLUE, RED = (0, 114, 178), (213, 94, 0)


def count_pixels(path, colour):
    """Returns how many pixels of a figure have about this colour."""
    image = np.asarray(Image.open(path).convert("RGB"), np.int64)
    assert image.shape[0] > 500 and image.shape[1] > 1000
    return int(np.all(np.abs(image - colour) < 40, axis=-1).sum())


def test_a_clean_verification(clean):
    out, result = clean
    assert "manual and mirrored: bit-identical\n" in result.stdout
    rounding = "each step equal within rounding: the order of summation differs\n"
    assert f"single and manual: {rounding}" in result.stdout
    assert re.search(r"manual – mirrored +0 +0 +everything", result.stdout)
    assert "float32, TF32 off" in result.stdout
    told = result.stderr.splitlines()
    assert sum("UNVERIFIED" in line for line in told) == len(told) <= 2  # Not once for each child.
    assert {path.name for path in out.iterdir()} == {
        ".lock", "config.json", "log.txt", "traces", "verify.json", "verify.png", "verify.svg",
        "report.html",
    }  # fmt: skip
    names = {f"{name}.npz" for name in ("single", "manual", "mirrored")}
    assert {path.name for path in (out / "traces").iterdir()} == names
    trace = load_trace(out / "traces" / "manual.npz")
    assert trace.named(2, "after", 1)["logits/kernel"].shape == (784, 10)
    assert count_pixels(out / "verify.png", BLUE) > 100
    assert count_pixels(out / "verify.png", RED) == 0
    figure = (out / "verify.svg").read_text("utf-8")
    assert re.search(r"manual = mirrored: (\d+) of \1 arrays bitwise equal", figure)
    assert "injected fault" not in figure


class NoOracle:
    """Computes nothing, and keeps what it is asked."""

    synchronized_layers = ()

    def __init__(self):
        self.asked = []

    def bitwise(self, asks, total):
        self.asked += asks
        return []


@pytest.mark.parametrize("kind", ["", "before", "data", "y_pred", "loss", "raw", "total"])
def test_what_has_the_bits_of_a_checked_training_is_not_computed_again(clean, kind):
    manual, mirrored = (
        load_trace(clean[0] / "traces" / f"{n}.npz") for n in ("manual", "mirrored")
    )
    changed, oracle = Trace(mirrored.about), NoOracle()
    for of in ("before", "after", "data", "y_pred", "loss", "raw"):
        for item in mirrored.items(of):
            arrays = [np.array(array) for array in mirrored.arrays(0, of, item)]
            if (of, item) == (kind, 1):
                arrays[0].reshape(-1)[:1] += 1
            if of == "data" and kind == "total" and item == 1:
                arrays = [array[:-1] for array in arrays]
            changed.put(0, of, item, arrays)
    proven = [Proven(manual, {0: frozenset({0, 1})})]
    right = {"": {0, 1}, "total": set()}.get(kind, {0})
    assert exact_shards(Context(changed, 0, oracle), proven) == right
    assert len(oracle.asked) == 2 - len(right)
    assert not exact_shards(Context(changed, 0, oracle), [Proven(manual, {})])


def test_shards_that_are_exact_are_told_by_the_position_of_their_step(monkeypatch):
    monkeypatch.setattr("lockstep.run.exact_shards", lambda c, _: frozenset({c.position}))
    trace = Script(steps=(1, 3)).trace()
    assert check_steps(trace).exact == {0: {0}, 1: {1}}


def test_the_record_holds_every_number(clean):
    record = load(clean[0])
    assert record["tf32"] is False and record["injected_fault"] == ""
    assert record["shown"]["caveats"] == [DATASET_CAVEATS["unverified"]]
    outcomes = {tuple(pair["trainings"]): pair["outcome"] for pair in record["pairs"]}
    assert outcomes == {
        ("single", "manual"): "equal within rounding",
        ("single", "mirrored"): "equal within rounding",
        ("manual", "mirrored"): "bit-identical",
    }
    manual = record["trainings"]["manual"]
    assert (manual["steps"], manual["status"]) == (["step 1", "step 2", "step 3"], "clean")
    measured = manual["measurements"]
    assert set(measured["step"]) == set(range(3))
    assert {"forward", "loss", "gradients", "all-reduce", "update"} <= set(measured["stage"])
    holds = zip(measured["distance"], measured["allowed"], measured["same_bits"], strict=True)
    assert all(distance <= allowed or same for distance, allowed, same in holds)


@pytest.mark.parametrize(
    "in_processes", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["here", "processes"]
)
def test_a_fault_is_caught_named_and_marked(tmp_path, request, in_processes):
    """In separate processes each strategy, and the check."""
    out, fault = tmp_path / "run", "drop_gradient:replica=1"
    arguments = [
        "verify", *SMALL, "--steps=2", "--strategies=manual,mirrored",
        f"--inject={fault},strategy=mirrored", f"--out={out}",
    ]  # fmt: skip
    if in_processes:
        result = run_main(*arguments, program=request.getfixturevalue("small_program"))
    else:
        result = run_here(*arguments)
    assert result.returncode == 9
    last = result.stderr.splitlines()[-1]
    assert last == f"error: mismatch in mirrored; see {out}/report.html"
    verdict = "mirrored is not the training on one device: lost part (replica)"
    assert result.stdout.count(verdict) == 1
    assert "the sum does not contain the gradient of replica 1" in result.stdout
    assert "Traceback" not in result.stderr
    assert "manual and mirrored: different\n" in result.stdout
    assert re.search(r"^ +where +all-reduce, every step; ", result.stdout, re.MULTILINE)
    assert f"injected fault: {fault}" in result.stderr
    assert "lost part (replica)" in (out / "report.html").read_text(encoding="utf-8")
    record = load(out)
    assert record["injected_fault"] == fault
    assert record["trainings"]["manual"]["findings"] == []
    (finding,) = record["trainings"]["mirrored"]["findings"]
    assert finding["detail"] == "lost_replica"
    for name in ("config.json", "log.txt"):
        assert "drop_gradient" in (out / name).read_text()
    assert not (out / "traces").exists()
    assert count_pixels(out / "verify.png", RED) > 100
    figure = (out / "verify.svg").read_text(encoding="utf-8")
    assert f"injected fault: {fault}" in figure and "lenet on " in figure


def test_a_fault_that_changes_too_little_is_told(tmp_path):
    inject = "--inject=scale_gradient:factor=1.00000001"
    arguments = [*SMALL, "--steps=1", "--strategies=manual", inject, f"--out={tmp_path}/run"]
    result = run_here_ok("verify", *arguments)
    assert "the injected fault was not found: scale_gradient:factor=1.00000001" in result.stderr


def describe(num_shards=2, **changes):
    """Returns the description of a trace of a model with BatchNorm."""
    return About(
        "lockstep", 2, (0,), (Variable("w", WEIGHT), Variable("mean", STATISTIC)), ("w",),
        shards=(Shard(0), Shard(1)) * (num_shards // 2) or (Shard(0),), **changes,
    )  # fmt: skip


def test_single_has_the_batch_norm_of_the_others():
    """Where these normalise shards, it trains on as many shards one after another."""
    without = dataclasses.replace(describe(), variables=(Variable("w", WEIGHT),))
    synced = describe(syncs_batch_norm=True)  # With statistics of the whole batch.
    assert shards_of_single([describe()]) == (1, 1)
    for others in ([synced], [describe(1)], [without]):
        assert shards_of_single(others) == ()
    # A pipeline has no other statistics than those of its micro-batches.
    assert shards_of_single([synced, describe(4)]) == (1, 1, 1, 1)


@pytest.mark.parametrize("num_shards", [2, 4])
def test_how_far_batch_norm_sets_trainings_apart_is_measured(num_shards):
    """Where one normalises two shards and the other four, not where both normalise the same."""
    traces = []
    for number, value in ((2, 1), (num_shards, 2)):
        trace = Trace(describe(number))
        for copy in (0, 1):
            trace.put(0, "sums", copy, [np.full(2, value, np.float32)])
            trace.put(0, "after", copy, [np.full(2, value, np.float32), None])
        traces.append(trace)
    pair = compare_traces(("manual", "pipeline"), tuple(traces))
    outcome = "equal within rounding" if num_shards == 2 else "another training by design"
    assert (pair.outcome, pair.absolute, pair.where) == (outcome, 1, "weights, w")
    assert ("the first gradients are 100.0% apart" in pair.why) == (num_shards == 4)
    faulty = compare_traces(("manual", "pipeline"), tuple(traces), has_fault=True)
    assert faulty.outcome == "different"
    same = compare_traces(("manual", "manual"), (traces[0], traces[0]), has_fault=True)
    assert same.outcome == "bit-identical"


def test_a_training_that_is_not_finite_is_refused(tmp_path):
    result = run_here(
        "verify", *SMALL, "--steps=3", "--recipe=fast", "--learning_rate=1e30",
        "--strategies=manual", f"--out={tmp_path}/run",
    )  # fmt: skip
    assert result.returncode == 7 and "not finite after step" in result.stderr.splitlines()[-1]


def test_steps_that_an_overflow_skips_are_listed(tmp_path, monkeypatch):
    monkeypatch.setattr("app.training.strategy_builder.INITIAL_LOSS_SCALE", 2.0**60)
    run_here_ok(
        "verify", *SMALL, "--steps=2", "--precision=mixed_float16", "--strategies=manual",
        f"--out={tmp_path}/run",
    )  # fmt: skip
    manual = load(tmp_path / "run")["trainings"]["manual"]
    assert manual["skipped_steps"] == [1, 2]
    assert "skipped 2 steps, as a gradient overflowed in float16 (1, 2)" in manual["about"]


def test_hierarchical_on_three_devices_is_refused_before_anything_is_trained(tmp_path):
    out = tmp_path / "run"
    result = run_here(
        "--strategy=mirrored", "--all_reduce=hierarchical", "--device=cpu", "--num_devices=3",
        "--allow_unverified_data", f"--out={out}",
    )  # fmt: skip
    assert result.returncode == 6
    assert "replica 2 was lost" in result.stderr.splitlines()[-1]


def test_every_file_of_a_training_with_a_fault_says_so(tmp_path):
    out = tmp_path / "run"
    fault = "--inject=scale_gradient:factor=0.5"
    command = [*SMALL, "--epochs=1", "--verify_every=0", fault, f"--out={out}"]
    result = run_here_ok(*command)
    fault = "scale_gradient:factor=0.5"
    assert result.stderr.count(f"injected fault: {fault}") == 1
    assert load_summary(out).injected_fault == fault
    assert [record.injected_fault for record in load_history(out)] == [fault]
    assert find_newest_checkpoint(out).metadata.config["inject"] == fault
    for name in ("config.json", "log.txt"):
        assert fault in (out / name).read_text()
    assert fault in run_here_ok("evaluate", f"--run={out}", "--allow_unverified_data").stderr
    honest = run_here(*command[:-2], f"--out={out}")
    assert honest.returncode == 4 and "inject" in honest.stderr
    refused = run_here(*command[:-2], "--inject=local_batch_norm", "--overwrite", f"--out={out}")
    assert refused.returncode == 2 and "needs a model with BatchNorm" in refused.stderr
    assert load_summary(out).status == "finished"  # What is there stays.


def test_a_refused_verify_leaves_what_is_there(clean):
    """Not even --overwrite deletes anything before there is something to put in its place."""
    out, _ = clean
    before = sorted(path.name for path in out.rglob("*"))
    for flags in (["--data_dir=/nonexistent"], ["--inject=local_batch_norm"]):
        result = run_here("verify", *SMALL, "--steps=3", *flags, "--overwrite", f"--out={out}")
        assert result.returncode in (2, 3)
        assert sorted(path.name for path in out.rglob("*")) == before
