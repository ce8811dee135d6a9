"""The examples for Keras, by `lockstep run`: what they say is found, and what is clean."""

import json
import sys

import pytest

import lockstep
from tests.conftest import ROOT, run_python, write_images
from tests.verifier.recorder_scripts import interpreter

THREE_WAYS = ROOT / "examples" / "keras_three_ways.py"
DEVICES = "XLA_FLAGS=--xla_force_host_platform_device_count=2"
FAULTS = {  # Example, words of the reference, those of the variant → node and name of the fault.
    ("keras_findings.py", "clipped 1", "clipped 2"): ("sum", ""),
    ("keras_findings.py", "scalar 1", "scalar 2"): ("loss", "wrong_factor"),
    ("keras_findings.py", "weighted 1", "weighted 2"): ("loss", "mean_of_means"),
    ("keras_findings.py", "dropout 1", "dropout 2"): ("random", "same_random_numbers"),
    ("keras_findings.py", "overflow 1", "overflow 2"): ("update", "not_finite"),
    ("record_fit.py", "1 x.npz", "2 x.npz"): ("gradient", "clipped_too_early"),
    ("record_train_step.py", "1", "2"): ("loss", "wrong_factor"),
    ("record_train_step.py", "1 corrected", "2 corrected"): None,
    ("record_two_inputs.py", "1", "2"): ("loss", "mean_of_means"),
    ("record_two_inputs.py", "1 corrected", "2 corrected"): None,
}


@pytest.mark.slow
@pytest.mark.parametrize("words", FAULTS, ids=" ".join)
def test_what_an_example_shows_is_found_at_its_place(words):
    file, *both = words
    python = f"{sys.executable} {ROOT}/examples/{file}"
    reference, variant = (f"{python} {each}" for each in both)
    options = "--reference", reference, "--variant", variant, "--json", "--steps=1"
    result = run_python("-m", "lockstep", "run", *options, env={"PYTHONPATH": ROOT}, timeout=600)
    (training,) = json.loads(result.stdout)["trainings"].values()
    place = training["place"]
    assert (result.returncode, training["status"]) == ((9, "fault") if place else (0, "clean"))
    assert (place and (place["node"], training["name"])) == FAULTS[words]


@pytest.mark.slow
def test_three_ways_are_the_training_on_one_device(tmp_path, monkeypatch):
    write_images(tmp_path, num_train=768, num_test=1)
    monkeypatch.setenv("FASHION_MNIST_DIR", str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    python = f"{sys.executable} {THREE_WAYS}"
    ways = {way: f"{python} {way}" for way in ("by_hand", "mirrored")}
    if interpreter("jax"):  # Keras is installed beside it.
        on_jax = f"env KERAS_BACKEND=jax JAX_PLATFORMS=cpu {DEVICES} {interpreter('jax')}"
        ways["data_parallel"] = f"{on_jax} {THREE_WAYS} data_parallel"
    lockstep.assert_same_training(f"{python} one_device", ways, steps=2)
