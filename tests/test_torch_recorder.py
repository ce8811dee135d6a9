"""The recorder of PyTorch: its files hold what was trained, and recording changes nothing.

The trainings and checks of `torch_cases.py` run in processes: with what stands in for PyTorch, and
with PyTorch itself where an interpreter has it, that of the tests or `LOCKSTEP_TORCH_PYTHON`.
"""

import pytest

from recorder_scripts import WITH_TORCH, run_cases


@pytest.mark.parametrize("framework", WITH_TORCH)
@pytest.mark.parametrize(("kind", "last"), [("one", "case_compiled"), ("two", "case_mesh")])
def test_recordings_of_torch(framework, kind, last, tmp_path):
    done = run_cases("torch", framework, tmp_path, kind)
    assert last in done.stdout
    if kind == "one":
        assert "exception.npz: the training ended before steps [2]" in done.stderr
