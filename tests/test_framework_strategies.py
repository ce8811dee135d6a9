"""Programs of other frameworks as strategies of `verify` and `compare`."""

import dataclasses
import json
import os
import shutil
import sys

import pytest

from app.records.history import load_history, load_required_summary
from app.verification.frameworks import FRAMEWORKS
from conftest import ROOT
from in_process import run_here, run_here_ok
from models import MODELS

ON_CPUS = ["--device=cpu", "--num_devices=2"]
FAKE = str(ROOT / "tests" / "recorder_scripts" / "fake_framework.py")
SMALL = ["--dataset=synthetic", "--num_train_examples=64", "--global_batch_size=32"]
NEEDED = ("LOCKSTEP_TORCH_PYTHON", "LOCKSTEP_JAX_PYTHON")


@pytest.mark.slow
@pytest.mark.skipif(
    not all(os.environ.get(name) for name in NEEDED), reason=f"{' or '.join(NEEDED)} is not set"
)
@pytest.mark.parametrize("model", ["lenet", "resnet18"])
def test_all_systems_are_one_training(tmp_path, model):
    """The first test of the file: the others replace the program of torch_ddp."""
    names = "single,manual,torch_ddp,jax_pmap"
    size = 32 if model == "lenet" else 8
    result = run_here(
        *("verify", f"--strategies={names}", f"--model={model}", "--steps=2", *ON_CPUS),
        *("--dataset=synthetic", f"--num_train_examples={2 * size}", f"--global_batch_size={size}"),
        f"--out={tmp_path}/v",
    )
    assert result.returncode == 0, result.stdout + result.stderr
    record = json.loads((tmp_path / "v" / "verify.json").read_text())
    assert len(record["pairs"]) == 6
    assert {pair["outcome"] for pair in record["pairs"]} <= {
        "bit-identical",
        "equal within rounding",
    }
    for name in ("torch_ddp", "jax_pmap"):
        measured = record["trainings"][name]["measurements"]["stage"]
        assert {"loss", "gradients", "all-reduce", "update"} <= {*measured}


@pytest.fixture(scope="module")
def fake():
    """Another program for torch_ddp, which needs no framework, and a dense layer for LeNet."""
    framework = dataclasses.replace(FRAMEWORKS["torch_ddp"], program=FAKE, package="json")
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(FRAMEWORKS, "torch_ddp", framework)
        patch.setitem(MODELS, "lenet", "dense_network:build_dense_network")
        patch.setenv("LOCKSTEP_JSON_PYTHON", sys.executable)
        yield


def compare(path):
    return run_here(
        *("compare", "--strategies=single,torch_ddp", "--epochs=1", *SMALL, *ON_CPUS),
        f"--out={path}",
    )


@pytest.fixture(scope="module")
def compared(fake, tmp_path_factory):
    out = tmp_path_factory.mktemp("compared") / "c"
    return out, compare(out)


@pytest.mark.slow
def test_what_a_program_has_trained_becomes_a_run(compared):
    out, result = compared
    assert result.returncode == 0, result.stderr
    assert "epoch 1: test acc 0.25" in result.stdout
    run = out / "torch_ddp"
    summary = load_required_summary(run)
    assert (summary.strategy, summary.num_replicas, summary.steps) == ("torch_ddp", 2, 2)
    assert (summary.test_accuracy, summary.epoch_sec, summary.images_per_sec) == (0.25, 2.0, 32.0)
    assert summary.versions["fake"] == "1.0" and "tensorflow" in summary.versions
    assert load_history(run)[0].evaluation_sec == 0.5
    record = json.loads((out / "compare.json").read_text())
    assert [run["strategy"] for run in record["runs"]] == ["single", "torch_ddp"]
    assert record["pairs"][0]["where"]  # It has trained nothing.
    assert "test acc" in run_here_ok("evaluate", f"--run={run}").stdout
    again = compare(out)
    assert f"{run} is already finished" in again.stdout


@pytest.mark.parametrize(
    ("mode", "exit_code", "message"),
    [
        ("fail", 6, "torch_ddp ended with exit code 1: out of ideas; run it by hand"),
        pytest.param(
            "no results", 3, "torch_ddp: did not write its results", marks=pytest.mark.slow
        ),
        ("other weights", 3, "has shape (1, 10), not (784, 10)"),
    ],
)
def test_what_a_program_does_wrong_is_one_line(
    compared, tmp_path, monkeypatch, mode, exit_code, message
):
    shutil.copytree(compared[0], tmp_path / "c")
    shutil.rmtree(tmp_path / "c" / "torch_ddp")
    monkeypatch.setenv("FAKE_FRAMEWORK", mode)
    result = compare(tmp_path / "c")
    assert result.returncode == exit_code
    assert message in result.stderr.splitlines()[-1]
    assert not (tmp_path / "c" / "torch_ddp" / "summary.json").exists()


def test_a_framework_that_is_not_installed_is_one_line(tmp_path, monkeypatch):
    monkeypatch.setenv("LOCKSTEP_TORCH_PYTHON", str(tmp_path / "python"))
    monkeypatch.setenv("LOCKSTEP_JSON_PYTHON", str(tmp_path / "python"))
    result = compare(tmp_path / "c")
    assert result.returncode == 2
    assert f"there is no {tmp_path / 'python'}; run `make frameworks`" in result.stderr
    assert not (tmp_path / "c").exists()
