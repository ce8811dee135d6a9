"""The recorder of JAX: its files hold what was trained, and recording changes nothing."""

import pytest

from tests.verifier.recorder_scripts import cases_of, needs, run_case


@needs("jax")
@pytest.mark.parametrize("script, name", cases_of("jax"))
def test_a_case_of_jax(script, name, scripts, tmp_path):
    run_case(scripts, "jax", script, name, tmp_path)
