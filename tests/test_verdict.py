"""The verdict over two trainings."""

import itertools

import pytest

from app.verification.measurement import Measurement
from app.verification.pair_outcomes import outcome_sentences
from app.verification.split import Split
from app.verification.trace_comparison import PairDifference
from app.verification.verdict import (
    DIFFERENT,
    EQUAL,
    IDENTICAL,
    Diagnosis,
    PairVerdict,
    StrategyVerdict,
)

WRONG = Measurement.counted((1, "examples", "examples", 0), 3)
APART = PairDifference(1, "weights", "a", 0, 0.1, 0.1, 9, identical=False)
SAME = PairDifference(1, "weights", "a", 0, 0.0, 0.0, 0, identical=True)


def verdict_of(name, mismatch):
    diagnosis = Diagnosis("other_order", "…") if mismatch else None
    measurements = [mismatch] if mismatch else []
    return StrategyVerdict(name, measurements, mismatch, diagnosis, None, Split(2, 2, 2))


@pytest.mark.parametrize(
    ("first", "second", "difference", "outcome"),
    [
        (None, None, APART, EQUAL),
        (WRONG, None, APART, DIFFERENT),
        (None, WRONG, APART, DIFFERENT),
        (WRONG, WRONG, APART, DIFFERENT),
        (None, None, SAME, IDENTICAL),
    ],
)
def test_one_wrong_training_makes_a_pair_different(first, second, difference, outcome):
    verdicts = verdict_of("manual", first), verdict_of("mirrored", second)
    assert PairVerdict.of(*verdicts, [difference]).outcome == outcome


def test_few_pairs_have_a_sentence_each():
    outcomes = [(("a", "b"), IDENTICAL), (("a", "c"), DIFFERENT), (("b", "c"), DIFFERENT)]
    assert outcome_sentences(outcomes) == [
        "a and b: bit-identical",
        "a and c: different",
        "b and c: different",
    ]


def test_many_pairs_are_said_in_groups():
    pairs = [*itertools.combinations("abcd", 2)]
    outcomes = [(pair, IDENTICAL if pair == ("b", "c") else EQUAL) for pair in pairs]
    assert outcome_sentences(outcomes) == [
        "a, b, c and d: equal within rounding",
        "b and c: bit-identical",
    ]
    assert outcome_sentences([(pair, IDENTICAL) for pair in pairs]) == [
        "a, b, c and d: bit-identical"
    ]
    outcomes = [(pair, DIFFERENT if "d" in pair else EQUAL) for pair in pairs]
    assert outcome_sentences(outcomes) == [
        "a, b and c: equal within rounding",
        "a, b and c – d: different",
    ]
