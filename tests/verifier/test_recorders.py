"""The recorders of PyTorch and JAX: files hold what was trained, and recording changes nothing."""

import re

import pytest

from tests.verifier.recorder_scripts import FOLDER, needs

CASES = [  # The functions `case_…` of the scripts.
    pytest.param(package, path.stem, name, id=f"{package}-{name}", marks=needs(package))
    for package in ("torch", "jax")
    for path in sorted(FOLDER.glob(f"{package}_*.py"))
    for name in re.findall(r"^def case_(\w+)", path.read_text("utf-8"), re.M)
]


@pytest.mark.parametrize("package, script, name", CASES)
def test_a_case(package, script, name, run):
    run(package, "case.py", script, name, processes=2 if script == "torch_ranks" else 1)
