"""The verdict over two trainings."""

import pytest

from app.verification.measurement import Measurement
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
