"""Keras on one device and on two, by `lockstep run`: the examples that say what is found."""

import json
import sys

import pytest

from tests.conftest import ROOT, run_python

PYTHON = sys.executable
FINDINGS = {  # Function of examples/keras_findings.py → node and name of its fault.
    "clipped": ("sum", ""),
    "scalar": ("loss", "wrong_factor"),
    "weighted": ("loss", "mean_of_means"),
    "dropout": ("random", "same_random_numbers"),
    "overflow": ("update", "not_finite"),
}


def fault_of(reference, variant, *options):
    """Returns node and name of the fault of a command; None if the verdict is clean."""
    commands = (f"{PYTHON} {ROOT}/examples/{command}" for command in (reference, variant))
    given = [x for each in zip(("--reference", "--variant"), commands, strict=True) for x in each]
    words = "-m", "lockstep", "run", *given, "--json", *options
    result = run_python(*words, env={"PYTHONPATH": str(ROOT)}, timeout=600)
    (training,) = json.loads(result.stdout)["trainings"].values()
    place = training["place"]
    assert (result.returncode, training["status"]) == ((9, "fault") if place else (0, "clean"))
    return (place["node"], training["name"]) if place else None


@pytest.mark.slow
@pytest.mark.parametrize("name", FINDINGS)
def test_a_finding_about_keras_is_found_at_its_place(name):
    file = f"keras_findings.py {name}"
    assert fault_of(f"{file} 1", f"{file} 2", "--steps=1") == FINDINGS[name]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("file", "found"),
    [
        ("record_train_step.py", ("loss", "wrong_factor")),
        ("record_two_inputs.py", ("loss", "mean_of_means")),
    ],
)
def test_a_recorded_example_is_wrong_and_its_correction_is_clean(file, found):
    assert fault_of(f"{file} 1", f"{file} 2") == found
    assert fault_of(f"{file} 1 corrected", f"{file} 2 corrected") is None
