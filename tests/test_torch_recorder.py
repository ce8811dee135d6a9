"""The recorder of PyTorch: its files hold what was trained, and recording changes nothing.

The trainings and checks of `torch_cases.py` run in processes: with what stands in for PyTorch, and
with PyTorch itself where an interpreter has it, that of the tests or `LOCKSTEP_TORCH_PYTHON`.
"""

import pytest

from recorder_scripts import WITH_TORCH, interpreter, run_cases


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
