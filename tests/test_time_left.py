"""Durations in words and the estimate of the time that is left."""

import pytest

from app.runtime import time_left
from app.runtime.progress_bar import TrainingProgress
from app.runtime.time_left import TimeLeft, duration_text
from strategies.base import StepTotals


@pytest.mark.parametrize(
    "seconds, text",
    [
        (0.4, "0 s"),
        (99, "99 s"),
        (100, "2 min"),
        (3 * 3600 + 300, "3 h 05 min"),
        (52 * 3600, "2 d 4 h"),
        (float("nan"), "0 s"),
    ],
)
def test_a_duration_has_one_or_two_units(seconds, text):
    assert duration_text(seconds) == text


def test_the_time_left_is_estimated_without_the_first_call(monkeypatch):
    now = iter([100.0, 102.0, 110.0, 130.0, 200.0])  # Compiling took the time before.
    monkeypatch.setattr(time_left.time, "monotonic", lambda: next(now))
    left = TimeLeft(70)
    assert left.after(10) is None
    assert left.after(11) is None
    assert left.after(20) == 50.0
    assert left.after(40) == 30.0
    assert left.after(70) is None


def test_a_step_that_is_reported_again_gives_no_estimate(monkeypatch):
    now = iter([100.0, 110.0])
    monkeypatch.setattr(time_left.time, "monotonic", lambda: next(now))
    left = TimeLeft(70)
    assert left.after(10) is None and left.after(10) is None


def test_a_long_training_prints_its_duration_as_soon_as_it_is_known(monkeypatch, capsys):
    now = iter(range(0, 10_000, 2))
    monkeypatch.setattr(time_left.time, "monotonic", lambda: float(next(now)))
    with TrainingProgress(10, 100) as progress:
        for step in (1, 2, 3):
            progress.step(step, StepTotals(2.0, 1, 2), 100.0)
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("epoch 1/10  loss 1.000  accuracy 0.500  100 images/s  step 2/1000, ")
    assert line.endswith(" min left")
