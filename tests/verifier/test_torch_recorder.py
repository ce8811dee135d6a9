"""The recorder of PyTorch: its files hold what was trained, and recording changes nothing."""

import pytest

from tests.verifier.recorder_scripts import cases_of, needs, run_case


@needs("torch")
@pytest.mark.parametrize("script, name", cases_of("torch"))
def test_a_case_of_torch(script, name, scripts, tmp_path):
    run_case(scripts, "torch", script, name, tmp_path)
