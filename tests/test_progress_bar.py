"""Durations in words and the estimate of the time that is left."""

import pytest

from app.runtime import progress_bar
from app.runtime.progress_bar import TrainingProgress, duration_text
from strategies.base import StepTotals


@pytest.mark.parametrize(
    "seconds, text",
    [
        (0.4, "0 s"),
        (99, "99 s"),
        (100, "2 min"),
        (3 * 3600 + 300, "3 h 05 min"),
        (52 * 3600, "2 d 4 h"),
    ],
)
def test_a_duration_has_one_or_two_units(seconds, text):
    assert duration_text(seconds) == text


def test_a_long_training_prints_its_duration_as_soon_as_it_is_known(monkeypatch, capsys):
    now = iter(range(0, 10_000, 2))
    create = progress_bar.create_bar

    def create_bar(**options):
        bar = create(**options)
        bar.get_time = lambda: float(next(now))
        return bar

    monkeypatch.setattr(progress_bar, "create_bar", create_bar)
    with TrainingProgress(10, 100) as progress:
        for step in (1, 2, 3):
            progress.step(step, StepTotals(2.0, 1, 2), 100.0)
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("epoch 1/10  loss 1.000  accuracy 0.500  100 images/s  step ")
    assert line.endswith(" min left")
