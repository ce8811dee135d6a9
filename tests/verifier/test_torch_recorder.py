"""The recorder of PyTorch: its files hold what was trained, and recording changes nothing.

The trainings and checks of `torch_cases.py` run in processes.
"""

import pytest

from tests.verifier.recorder_scripts import needs, run_cases

pytestmark = needs("torch")


def test_recordings_of_torch(tmp_path):
    done = run_cases("torch", tmp_path, "two", "one")
    assert "exception.npz: the training ended before steps [2]" in done.stderr


@pytest.mark.slow
def test_further_recordings_of_torch(tmp_path):
    run_cases("torch", tmp_path, "four", "sharded", "more")
