"""The recorder of JAX: its files hold what was trained, and recording changes nothing.

The trainings and checks of `jax_cases.py` run in processes: with what stands in for JAX, and with
JAX itself where an interpreter has it, that of the tests or `LOCKSTEP_JAX_PYTHON`.
"""

import pytest

from recorder_scripts import WITH_JAX, run_cases


@pytest.mark.parametrize("framework", WITH_JAX)
def test_recordings_of_jax(framework, tmp_path):
    done = run_cases("jax", framework, tmp_path)
    assert "case_errors" in done.stdout
    assert done.stderr.count(" steps was recorded") == 1 and "none of 6" in done.stderr
