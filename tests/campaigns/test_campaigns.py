"""A short run of each campaign."""

import pytest

from tests.campaigns import fuzz, mutations
from tests.conftest import ROOT, assert_ok, run_python


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
def test_a_short_campaign():
    words = ["kills", "--cycles=2", "--seed=3", "--only=manual,disk-full"]
    done = assert_ok(run_python("-m", "tests.campaigns", *words, timeout=900))
    assert ": all held; " in done.stdout.splitlines()[-1]
