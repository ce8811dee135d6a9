"""A short run of each campaign."""

import subprocess
import sys

import pytest

from lockstep.engine.verdict import CLEAN
from tests.campaigns import fuzz, mutations, optimizers
from tests.conftest import ROOT
from tests.verifier.recorder_scripts import needs


def test_the_list_of_bugs_fits_the_program():
    """`old` occurs once, and the program with `new` can still be compiled."""
    for mutation in mutations.listed():
        source = (ROOT / mutation.file).read_text("utf-8")
        compile(mutation.changed(source), mutation.file, "exec")


@pytest.mark.parametrize("target", fuzz.TARGETS)
def test_bad_input_is_refused_in_a_line(target):
    outcomes = fuzz.fuzz(target, examples=60, seed=1)
    assert outcomes["refused"] > 10 and outcomes["accepted"] > 0


@pytest.mark.slow
def test_a_right_optimizer_is_clean_and_one_that_clips_before_the_sum_is_not(monkeypatch):
    for name, value in {"NUM_STEPS": 1, "NUM_REPLICAS": 2, "GLOBAL_BATCH_SIZE": 10}.items():
        monkeypatch.setattr(optimizers, name, value)
    for settings in ({}, {"clipnorm": 0.01}):
        monkeypatch.setitem(optimizers.SETTINGS, "SGD", settings)
        status, _ = optimizers.search("attention/SGD/mixed_bfloat16", seed=1)
        assert (status == CLEAN) == (settings == {})


@pytest.mark.slow
@pytest.mark.parametrize(
    "words",
    [
        "kills --cycles=2 --seed=3 --only=manual",
        pytest.param("bounds --cycles=1 --seed=0 --only=MLP", marks=needs("torch")),
    ],
)
def test_a_short_campaign(words):
    command = [sys.executable, "-m", "tests.campaigns", *words.split()]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr
    assert ": all held; " in done.stdout.splitlines()[-1]
