"""The default differences of a port from PyTorch to Keras, each recorded and verified."""

import json
import os
import subprocess
import sys

import pytest

from conftest import ROOT
from in_process import run_here

sys.path.append(str(ROOT / "tests" / "recorder_scripts"))
from port_cases import DIFFERENCES, RIGHT

TORCH = os.environ.get("LOCKSTEP_TORCH_PYTHON", "")
SCRIPTS = ROOT / "tests" / "recorder_scripts"
CASES = {**RIGHT, **DIFFERENCES}

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not TORCH, reason="LOCKSTEP_TORCH_PYTHON is not set: a python with PyTorch"),
]


def record(python, script, *options):
    result = subprocess.run(
        [python, SCRIPTS / script, *options],
        env={**os.environ, "PYTHONPATH": str(ROOT / "recorders"), "TF_CPP_MIN_LOG_LEVEL": "3"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr


@pytest.fixture(scope="module")
def originals(tmp_path_factory):
    """Records the script of PyTorch with some options, once; also with permuted examples."""
    folder, known = tmp_path_factory.mktemp("originals"), {}

    def recorded(options):
        if options not in known:
            one, permuted = (folder / f"{name}{len(known)}.npz" for name in ("one", "permuted"))
            record(TORCH, "port_torch.py", *options, f"--trace={one}")
            replay = f"--trace={permuted}", f"--replay={one}", "--permute=1"
            record(TORCH, "port_torch.py", *options, *replay)
            known[options] = one, permuted
        return known[options]

    return recorded


@pytest.mark.parametrize("name", CASES)
def test_what_a_port_changes_is_named(originals, tmp_path, name):
    case, port, out = CASES[name], tmp_path / "keras.npz", tmp_path / "out"
    one, permuted = originals(case.torch)
    replay = [f"--replay={one}"] if case.replays else []
    record(sys.executable, "port_keras.py", *case.keras, f"--trace={port}", *replay)
    result = run_here("verify", f"--traces={one},{port},{permuted}", f"--out={out}")
    assert result.returncode == (9 if case.faults else 0), result.stderr
    found = json.loads((out / "verify.json").read_text())["strategies"]["keras.npz"]
    assert "not matched" not in found["model"]
    for status, expected in (("fault", case.faults), ("by design", case.by_design)):
        causes = [(f["stage"], f["cause"]) for f in found["findings"] if f["status"] == status]
        assert sorted(causes) == sorted(expected)
