"""The recorder of PyTorch: its files hold what was trained, and recording changes nothing.

The trainings and checks of `torch_cases.py` run in processes: with what stands in for PyTorch, and
with PyTorch itself where an interpreter has it, that of the tests or `LOCKSTEP_TORCH_PYTHON`.
"""

import os
import subprocess
import sys

import pytest

from recorder_scripts import FOLDER, WITH_TORCH, interpreter, run_cases

STAND_IN = FOLDER / "stand_in" / "torch.py"


@pytest.mark.parametrize("framework", WITH_TORCH)
@pytest.mark.parametrize(("kind", "last"), [("one", "case_compiled"), ("two", "case_mesh")])
def test_recordings_of_torch(framework, kind, last, tmp_path):
    done = run_cases("torch", framework, tmp_path, kind)
    assert last in done.stdout
    if kind == "one":
        assert "exception.npz: the training ended before steps [2]" in done.stderr


@pytest.mark.slow
@pytest.mark.skipif(not interpreter("torch"), reason="needs torch")
def test_recordings_of_torch_on_a_mesh(tmp_path):
    assert "case_parts_of_the_processes" in run_cases("torch", "torch", tmp_path, "four").stdout


SHARDED = """
from torch import nn
from torch.distributed.fsdp import fully_shard
model = nn.Sequential(nn.Linear(4, 2))
fully_shard(model)
record_torch.record("x.npz", model)
"""


@pytest.mark.parametrize(
    ("version", "code", "error"),
    [
        ("2.6.0", "", ""),
        ("2.5.1+cu124", "", "ImportError: record_torch: PyTorch 2.5.1+cu124, needs 2.6 or newer"),
        ("2.7.1", SHARDED, "ValueError: model: fully_shard of PyTorch 2.7.1; needs 2.8 or newer"),
        ("2.8.0", SHARDED, ""),
    ],
)
def test_versions_of_torch_that_are_too_old_are_refused(version, code, error, tmp_path):
    text = STAND_IN.read_text(encoding="utf-8").replace("2.13+stand.in", version)
    (tmp_path / "torch.py").write_text(text, encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-c", f"from lockstep import record_torch\n{code}"],
        env={**os.environ, "PYTHONPATH": f"{FOLDER.parents[1]}{os.pathsep}{tmp_path}"},
        cwd=tmp_path, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == bool(error)
    assert done.stderr.strip().splitlines()[-1:] == ([error] if error else [])


@pytest.mark.slow
@pytest.mark.skipif(not interpreter("torch"), reason="needs torch")
@pytest.mark.parametrize("kind", ["clamp", "average", "hook", "checkpoint", "sparse"])
def test_what_a_script_changes_after_the_update_belongs_to_the_step(kind, tmp_path):
    script = FOLDER / "torch_later_changes.py"
    environment = {**os.environ, "PYTHONPATH": str(FOLDER.parents[1]), "OMP_NUM_THREADS": "1"}

    def run(*command):
        done = subprocess.run(
            [interpreter("torch"), *command], env=environment, cwd=tmp_path, capture_output=True,
            text=True, timeout=200, check=False,
        )  # fmt: skip
        return done.returncode, done.stdout + done.stderr[-3000:]

    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2")
    assert run(script, kind)[0] == 0
    for wrong, code in (((), 0), (("wrong",), 9)):
        ended, printed = run(*launcher, script, kind, *wrong)
        assert ended == 0, printed
        found, printed = run("-m", "lockstep", "one.npz", "two.npz")
        assert found == code, printed
        assert "one.npz has no fault in itself" in printed
