"""`verify`, `--inject` and `--verify_every` as a user runs them: verdicts, exit codes, files."""

import json

import jsonschema
import numpy as np
import pytest

from app.records.history import load_summary
from app.verification import step_check, verify
from lockstep.engine.verdict import CLEAN, Verdict
from models import MODELS
from tests.cli.report_samples import Page
from tests.conftest import ROOT, make_small, run_main
from tests.in_process import run_here, run_here_ok
from tests.verifier.trainer import Script

SMALL = [
    "--device=cpu", "--num_devices=2", "--dataset=synthetic", "--global_batch_size=15",
    "--num_train_examples=40", "--learning_rate=0.05",  # Batches of 15, 15 and 10.
]  # fmt: skip
STRATEGIES = ("single", "manual", "mirrored", "sharded")

pytestmark = pytest.mark.usefixtures("small")


def load(out):
    return json.loads((out / "verify.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def clean(tmp_path_factory):
    """All strategies, with BatchNorm, over an epoch whose last batch is short."""
    out = tmp_path_factory.mktemp("verify") / "run"
    words = [*SMALL, f"--strategies={','.join(STRATEGIES)}", "--steps=4", f"--out={out}"]
    with pytest.MonkeyPatch.context() as patch:
        make_small(patch)
        patch.setitem(MODELS, "lenet", "tests.dense_network:build_conv_norm_network")
        return out, run_here_ok("verify", *words)


@pytest.mark.parity
def test_every_strategy_is_clean_and_three_are_bit_identical(clean):
    out, result = clean
    record = load(out)
    for name in STRATEGIES:
        sentence = record["trainings"][name]["sentence"]
        assert sentence.startswith(f"{name} is the training on one device")
        assert sentence in result.stdout
    sentences = [record["trainings"][name]["sentence"] for name in STRATEGIES]
    assert Page(out / "report.html").paragraphs("good") == sentences
    assert len(record["pairs"]) == 6
    for pair in record["pairs"]:
        by_design = "single" in pair["trainings"]
        assert pair["outcome"] == ("two trainings by design" if by_design else "bit-identical")
    assert "bit-identical: manual – mirrored, manual – sharded" in result.stdout
    assert "TF32 off" in result.stdout


def test_what_a_verification_leaves(clean):
    out, result = clean
    assert {path.name for path in out.iterdir()} == {
        ".lock", "config.json", "log.txt", "verify.json", "report.html",
    }  # fmt: skip
    told = result.stderr.splitlines()  # Not once for each child.
    assert all(line.startswith("WARNING: ") for line in told) and len({*told}) == len(told)
    manual = load(out)["trainings"]["manual"]
    assert manual["steps"] == [f"step {number}" for number in range(1, 5)]
    compared = {node for node, each in manual["nodes"].items() if each != "not measured"}
    assert {"examples", "outputs", "sum", "update"} <= compared
    schema = json.loads((ROOT / "lockstep" / "verify.schema.json").read_text(encoding="utf-8"))
    of_training = {**schema["$defs"]["training"], "$defs": schema["$defs"]}
    for own in ("devices", "simulated_devices", "diverged_step"):
        manual.pop(own, None)
    jsonschema.validate(manual, of_training)


def test_a_refused_verify_leaves_what_is_there(clean):
    out, _ = clean
    before = sorted(path.name for path in out.rglob("*"))
    for flags in (["--strategies=manual,magic"], ["--dataset=fashion_mnist", "--data_dir=/none"]):
        result = run_here("verify", *SMALL, "--steps=3", *flags, "--overwrite", f"--out={out}")
        assert result.returncode in (2, 3)
        assert sorted(path.name for path in out.rglob("*")) == before


# Fault, with flags → the node of its place, its finer name and its step.
FAULTS = {
    "drop_gradient:replica=0,step=3": ("sum", "lost_part", "step 3"),
    "scale_gradient:factor=3": ("sum", "wrong_factor", "step 1"),
    "mean_of_means": ("sum", "", "step 1"),
    "same_shard": ("examples", "batch_not_split", "step 1"),
    "reset_optimizer_state --recipe=fast": ("update", "", "step 3"),
    "perturb_weight:step=2": ("update", "diverged_replicas", "step 2"),
}
CASES = [
    pytest.param(name, fault, marks=() if name == "manual" else pytest.mark.slow)
    for name in ("manual", "mirrored", "sharded")
    for fault in FAULTS
]


@pytest.mark.parametrize(("name", "fault"), CASES)
def test_each_fault_is_found_at_its_place(tmp_path, name, fault):
    out = tmp_path / "run"
    words = [*SMALL, f"--strategies={name}", "--steps=3", f"--out={out}"]
    result = run_here("verify", *words, *f"--inject={fault}".split())
    assert result.returncode == 9, result.stdout + result.stderr
    assert result.stderr.splitlines()[-1] == f"error: mismatch in {name}; see {out}/report.html"
    assert "WARNING: injected fault: " in result.stderr
    record = load(out)["trainings"][name]
    node, mistake, step = FAULTS[fault]
    assert (record["place"]["node"], record["place"]["step"]) == (node, step)
    has_no_name = fault == "perturb_weight:step=2" and name == "sharded"  # There is one copy.
    assert record["name"] == ("" if has_no_name else mistake)
    assert f"{name} is not the training on one device" in result.stdout
    assert record["sentence"] in (out / "report.html").read_text(encoding="utf-8")


def test_a_fault_is_injected_into_the_strategy_that_is_named(tmp_path):
    words = [*SMALL, "--steps=1", "--strategies=manual,mirrored", f"--out={tmp_path}/run"]
    result = run_here("verify", *words, "--inject=drop_gradient:strategy=mirrored")
    assert result.returncode == 9
    trainings = load(tmp_path / "run")["trainings"]
    found = [(trainings[name]["status"], trainings[name]["name"]) for name in trainings]
    assert found == [("clean", ""), ("fault", "lost_part")]
    assert "manual and mirrored: different" in result.stdout
    page = Page(tmp_path / "run" / "report.html")
    good, bad = map(page.paragraphs, ("good", "bad"))
    assert [*good, *bad] == [trainings[name]["sentence"] for name in trainings]
    assert bad[0].endswith("part of the batch lost in step 1 (sum)")
    assert page.row("manual – mirrored")[1] == "different" and page.row("sum")[2].startswith("✗ ")
    facts = trainings["mirrored"]["facts"].values()
    assert {text for text in facts if "`" not in text} <= {*page.text}  # Else a part is code.


def test_a_fault_that_changes_too_little_is_told(tmp_path):
    inject = "--inject=scale_gradient:factor=1.00000001"
    words = [*SMALL, "--steps=1", "--strategies=single,manual", inject, f"--out={tmp_path}/run"]
    result = run_here_ok("verify", *words)
    assert "single and manual: each step equal within rounding" in result.stdout
    assert "the injected fault was not found: scale_gradient:factor=1.00000001" in result.stderr


def test_a_pair_that_differs_in_an_early_step_alone_is_not_bit_identical():
    first, second = Script().trace(), Script().trace()
    assert verify._have_same_arrays(first, second)
    second.put(0, "loss", 0, [np.float32(9)])
    assert not verify._have_same_arrays(first, second)


@pytest.mark.slow
def test_workers_and_processes_are_verified(tmp_path, small_program):
    """A strategy, and two workers."""
    words = ["verify", "--device=cpu", *SMALL[2:], "--strategies=manual,multi_worker", "--steps=3"]
    result = run_main(*words, f"--out={tmp_path}/run", program=small_program)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "multi_worker is the training on one device" in result.stdout
    fault = "--inject=drop_gradient:strategy=multi_worker"
    result = run_main(*words, fault, f"--out={tmp_path}/fault", program=small_program)
    assert result.returncode == 9 and "Traceback" not in result.stderr
    training = load(tmp_path / "fault")["trainings"]["multi_worker"]
    assert (training["place"]["node"], training["name"]) == ("sum", "lost_part")


# `--verify_every`


@pytest.mark.parity
def test_verified_steps_change_nothing_and_are_counted(tmp_path):
    words = [*SMALL, "--recipe=fast", "--epochs=2"]
    summaries = []
    for name, more in (("plain", []), ("verified", ["--verify_every=2"])):
        run_here_ok(*words, *more, f"--out={tmp_path}/{name}")
        summaries.append(load_summary(tmp_path / name))
    assert summaries[0]["weights_sha256"] == summaries[1]["weights_sha256"]
    assert summaries[1]["verified_steps"] == 3  # 2, 4 and 6; the rate of step 1 is 0.
    assert summaries[0]["verified_steps"] == 0


def test_copies_that_differ_by_less_than_rounding_stop_the_training(tmp_path, monkeypatch):
    judged = Verdict(CLEAN, training="manual"), 0
    monkeypatch.setattr(step_check, "judge", lambda *_: judged)
    words = ["--epochs=1", "--verify_every=9", "--inject=perturb_weight:step=1"]
    result = run_here(*SMALL, *words, f"--out={tmp_path}/run")
    last = result.stderr.splitlines()[-1]
    assert last.startswith("error: manual has a mismatch: ")
    assert result.returncode == 9 and "on replica 1 differs from replica 0" in last
