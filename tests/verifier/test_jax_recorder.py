"""The recorder of JAX: its files hold what was trained, and recording changes nothing.

The trainings and checks of `jax_cases.py` run in processes.
"""

import pytest

from tests.verifier.recorder_scripts import needs, run_cases


@needs("jax")
@pytest.mark.parametrize(
    ("kind", "words"), [("one", "none of 6"), pytest.param("more", "", marks=pytest.mark.slow)]
)
def test_recordings_of_jax(kind, words, tmp_path):
    done = run_cases("jax", tmp_path, kind)
    assert done.stderr.count(" steps was recorded") == bool(words) and words in done.stderr
