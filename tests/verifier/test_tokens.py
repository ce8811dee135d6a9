"""Log-probabilities of tokens: rows of the table, and programs of PyTorch."""

import pytest

from lockstep.comparison import compare_traces
from tests.verifier import check, tokens
from tests.verifier.recorder_scripts import FOLDER, needs, run_script


@pytest.mark.parametrize("row", tokens.ROWS, ids=lambda row: row.name)
def test_verdict(row):
    check(row)


def test_statistics_are_told_of_right_programs_too():
    verdict = tokens.compared({}, {})
    (note,) = verdict.notes
    assert note.startswith("batch 0: 0 of 21 tokens differ by more than rounding"), note
    assert verdict.ok and "two.npz is the model of one.npz" in str(verdict)


def test_other_tokens_are_refused():
    other = tokens.program("two.npz")
    stored = dict(other.stored())
    stored["1/tokens/0/0"] = (stored["1/tokens/0/0"] + 1) % tokens.WORDS
    other = type(other)(other.about, stored, "two.npz")
    with pytest.raises(ValueError, match="no batch with the same tokens"):
        compare_traces([tokens.program("one.npz"), other], {})


@needs("torch")
def test_a_trainer_and_a_generator(tmp_path):
    done = run_script("torch", FOLDER / "torch_tokens.py", tmp_path)
    assert "all of tokens" in done.stdout, done.stdout + done.stderr[-3000:]
