"""Log-probabilities of tokens: small ones, and programs of PyTorch."""

import pytest

from lockstep.comparison import compare_traces
from lockstep.engine.verdict import NOT_VERIFIED
from tests.verifier import tokens
from tests.verifier.recorder_scripts import FOLDER, needs, run_script


@pytest.mark.parametrize("name", tokens.PROGRAMS)
def test_log_probabilities_are_the_outputs_of_a_program(name):
    first, second, mistake, reason = tokens.PROGRAMS[name]
    verdict = tokens.compared(first, second)
    assert verdict.ok == (not mistake) and reason in verdict.reason and not verdict.error, verdict
    assert verdict.name == mistake
    assert not mistake or verdict.place.node == ("start" if name == "old weights" else "outputs")
    assert name != "another module" or verdict.place.module == "b, forward"


def test_differences_of_right_programs_are_noted():
    (note,) = tokens.compared({}, {}).remarks
    assert note.startswith("batch 0: 0 of 21 tokens differ by more than rounding"), note


def test_other_tokens_are_not_verified():
    other = tokens.program("two.npz")
    stored = dict(other.stored())
    stored["1/tokens/0/0"] = (stored["1/tokens/0/0"] + 1) % tokens.WORDS
    other = type(other)(other.about, stored, "two.npz")
    verdict = compare_traces([tokens.program("one.npz"), other], {})["two.npz"]
    assert verdict.status == NOT_VERIFIED
    assert verdict.missing == ("no batch has the same tokens in both",)


@needs("torch")
def test_a_trainer_and_a_generator(tmp_path):
    done = run_script("torch", FOLDER / "torch_tokens.py", tmp_path)
    assert "all of tokens" in done.stdout, done.stdout + done.stderr[-3000:]
