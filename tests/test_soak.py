"""Some of the cycles of `make soak`, whose process forks itself and adopts orphans."""

import subprocess
import sys

import pytest

from conftest import ROOT


@pytest.mark.slow
def test_trainings_that_are_disturbed_again_and_again_end_with_the_same_weights(tmp_path):
    command = [sys.executable, ROOT / "tests" / "soak.py", "--cycles=6", "--strategies=manual"]
    done = subprocess.run([*command, "--seed=3"], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "6 of 6 cycles held" in done.stdout.splitlines()[-1]
