"""Programs of other frameworks as strategies of `verify` and `compare`."""

import dataclasses
import json
import shutil
import sys

import pytest

from app.records.history import load_history, load_summary
from app.verification.frameworks import FRAMEWORKS
from tests.conftest import ROOT
from tests.in_process import run_here, run_here_ok
from tests.verifier.recorder_scripts import needs

ON_CPUS = ["--device=cpu", "--num_devices=2"]
SMALL = ["--dataset=synthetic", "--num_train_examples=64", "--global_batch_size=32"]


@pytest.mark.slow
@needs("torch", "jax")
def test_all_systems_are_one_training(tmp_path):
    names = "single,manual,torch_ddp,jax_pmap"
    result = run_here(
        *("verify", f"--strategies={names}", "--model=resnet18", "--steps=2", *ON_CPUS),
        *("--dataset=synthetic", "--num_train_examples=16", "--global_batch_size=8"),
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


def compare(path):
    return run_here(
        *("compare", "--strategies=single,torch_ddp", "--epochs=1", *SMALL, *ON_CPUS),
        f"--out={path}",
    )


@pytest.fixture(scope="module")
def compared(tmp_path_factory):
    out = tmp_path_factory.mktemp("compared") / "c"
    return out, compare(out)


@pytest.mark.slow
@needs("torch")
def test_what_a_program_has_trained_becomes_a_run(compared):
    out, result = compared
    assert result.returncode == 0, result.stderr
    line = next(line for line in result.stdout.splitlines() if "epoch 1: test acc " in line)
    run = out / "torch_ddp"
    summary, (epoch,) = load_summary(run), load_history(run)
    assert (summary.strategy, summary.num_replicas, summary.steps) == ("torch_ddp", 2, 2)
    assert f"test acc {summary.test_accuracy:.2f}" in line
    assert summary.images_per_sec == pytest.approx(64 / summary.epoch_sec)
    assert summary.epoch_sec == epoch.epoch_sec > 0 < epoch.evaluation_sec
    assert {"torch", "tensorflow"} <= summary.versions.keys()
    record = json.loads((out / "compare.json").read_text())
    assert [run["strategy"] for run in record["runs"]] == ["single", "torch_ddp"]
    evaluated = run_here_ok("evaluate", f"--run={run}").stdout
    assert f"test acc {summary.test_accuracy:.2f}" in evaluated.replace(":", "")
    again = compare(out)
    assert f"{run} is already finished" in again.stdout


BROKEN = """
import pathlib, subprocess, sys
import numpy as np
subprocess.run([sys.executable, {program!r}, *sys.argv[1:]], check=True)
files = dict(word[2:].split("=", 1) for word in sys.argv[1:])
"""
WEIGHTS = "np.savez(files['weights'], **{n: a[:1] for n, a in np.load(files['weights']).items()})"


@pytest.mark.slow
@needs("torch")
def test_weights_of_another_shape_are_one_line(compared, tmp_path, monkeypatch):
    shutil.copytree(compared[0], tmp_path / "c")
    shutil.rmtree(tmp_path / "c" / "torch_ddp")
    framework, script = FRAMEWORKS["torch_ddp"], tmp_path / "broken.py"
    program = str(ROOT / "frameworks" / framework.program)
    script.write_text(BROKEN.format(program=program) + WEIGHTS, encoding="utf-8")
    changed = dataclasses.replace(framework, program=str(script))
    monkeypatch.setitem(FRAMEWORKS, "torch_ddp", changed)
    result = compare(tmp_path / "c")
    assert result.returncode == 3
    message = "has shape (1, 3, 1, 20), not (3, 3, 1, 20)"
    assert message in result.stderr.splitlines()[-1]
    assert not (tmp_path / "c" / "torch_ddp" / "summary.json").exists()


@pytest.mark.parametrize(
    ("text", "code", "message"),
    [
        ("import sys\nprint('before', file=sys.stderr)\nsys.exit('error: no ideas')", 6,
         "torch_ddp ended with exit code 1: no ideas; run it by hand"),
        ("", 3, "torch_ddp: did not write its results"),
    ],
)  # fmt: skip
def test_a_program_that_fails_is_one_line(small_lenet, monkeypatch, tmp_path, text, code, message):
    """A program that needs no framework."""
    script = tmp_path / "program.py"
    script.write_text(text)
    framework = dataclasses.replace(FRAMEWORKS["torch_ddp"], program=str(script), package="json")
    monkeypatch.setitem(FRAMEWORKS, "torch_ddp", framework)
    monkeypatch.setenv("LOCKSTEP_JSON_PYTHON", sys.executable)
    result = compare(tmp_path / "c")
    assert result.returncode == code
    assert message in result.stderr.splitlines()[-1]


def test_a_framework_that_is_not_installed_is_one_line(tmp_path, monkeypatch):
    monkeypatch.setenv("LOCKSTEP_TORCH_PYTHON", str(tmp_path / "python"))
    result = compare(tmp_path / "c")
    assert result.returncode == 2
    assert f"there is no {tmp_path / 'python'}; run `make frameworks`" in result.stderr
    assert not (tmp_path / "c").exists()
