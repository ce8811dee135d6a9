"""Tests medians, ratios and their intervals."""

import numpy as np
import pytest

from app.performance import interval


def test_a_median_lies_in_its_interval_and_outliers_do_not_move_it():
    found = interval.median([1.0, 1.1, 0.9, 1.0, 50.0, 1.05, 0.95])
    assert found.value == 1.0
    assert found.low <= 1.0 <= found.high < 50


def test_noise_that_hits_both_in_the_same_round_cancels():
    """Without pairing by round these would be far apart."""
    slow_down = np.random.default_rng(0).uniform(1, 3, 41)
    paired = interval.ratio(1.02 * slow_down, slow_down)
    assert paired.value == pytest.approx(1.02)
    assert paired.high - paired.low < 1e-9


def test_independent_noise_leaves_a_difference_open():
    generator = np.random.default_rng(0)
    a, b = generator.normal(1, 0.1, 15), generator.normal(1, 0.1, 15)
    assert interval.ratio(a, b).contains(1.0)
    assert not interval.ratio(2 * a, b).contains(1.0)


def test_the_interval_covers_the_truth_about_as_often_as_it_says():
    generator = np.random.default_rng(0)
    covered = [
        interval.ratio(generator.normal(3, 0.3, 21), generator.normal(2, 0.2, 21)).contains(1.5)
        for _ in range(200)
    ]
    assert 0.88 < np.mean(covered) <= 1


def test_it_is_a_function_of_what_was_measured():
    values = [1.0, 2.0, 3.0, 4.0]
    assert interval.median(values) == interval.median(values)


def test_samples_of_other_rounds_are_refused():
    with pytest.raises(ValueError, match="rounds"):
        interval.ratio([1.0, 2.0], [1.0])
