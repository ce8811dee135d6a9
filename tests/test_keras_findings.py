"""The programs of `docs/keras_findings.md`: Keras still does what the page says."""

import re
import subprocess
import sys

import numpy as np
import pytest

from conftest import ROOT, program_environment

PAGE = (ROOT / "docs/keras_findings.md").read_text(encoding="utf-8")
START, *PROGRAMS = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)

pytestmark = pytest.mark.slow


def printed(program):
    """Runs a program; returns the numbers of each line that it prints."""
    result = subprocess.run(
        [sys.executable, "-c", START + program],
        capture_output=True, text=True, timeout=120, check=True, env=program_environment(),
    )  # fmt: skip
    lines = result.stdout.strip().splitlines()
    return [np.array([float(n) for n in re.findall(r"-?\d+\.?\d*|inf", line)]) for line in lines]


def test_the_page_has_a_program_for_each_finding():
    assert len(PROGRAMS) == PAGE.count("\n## ") == 5
    assert PAGE.startswith("# Five findings")


def test_gradients_are_clipped_before_they_are_summed():
    one, two = printed(PROGRAMS[0])
    assert one == pytest.approx([1, 0.1], abs=1e-6) and two == pytest.approx([2, 0.189], abs=1e-3)


def test_a_scalar_loss_is_not_divided():
    one, two = printed(PROGRAMS[1])
    assert two[1] / one[1] == pytest.approx(2, rel=1e-6)


def test_a_weighted_mean_is_the_mean_of_weighted_means():
    one, two = printed(PROGRAMS[2])
    assert one[1:] == pytest.approx([0.259, 0.128, -0.008], abs=1e-3)
    assert two[1:] == pytest.approx([0.410, 0.124, 0.116], abs=1e-3)


def test_dropout_masks_are_equal_on_all_replicas():
    first, second = printed(PROGRAMS[3])
    assert len(first) == 12 and set(first) == {0, 2} and np.array_equal(first, second)


def test_only_an_overflow_on_the_first_replica_is_skipped():
    one, two = printed(PROGRAMS[4])
    assert one.tolist() == [1, 0, 16384] and two.tolist() == [2, np.inf, 32768]
    turned = PROGRAMS[4].replace("from_tensor_slices((x, y))", "from_tensor_slices((x, y[::-1]))")
    one, two = printed(turned)
    assert one.tolist() == [1, 0, 16384] and two.tolist() == [2, 0, 16384]
