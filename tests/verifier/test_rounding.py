"""How far rounding reaches: in gradients, in their sums, and in what an update changes."""

import dataclasses

import numpy as np
import pytest

from lockstep.numeric.arrays import EPS, UNITS, Rows, dense, distance
from lockstep.numeric.state_bounds import change_by_element, of_start, spread_of
from lockstep.numeric.tolerance import WITH_SPREAD, ZERO, Tolerance


def test_a_gradient_of_zeros_has_no_ties():
    zeros = {"w": np.zeros(8)}
    assert Tolerance(ties=1e-3).shares(zeros, [(1.0, zeros)]) == {"w": 0.0}


@pytest.mark.parametrize(("size", "is_right"), [(1e-5, True), (1e-4, False)])
def test_a_gradient_behind_batch_norm_that_is_rounding_alone_counts_as_zero(size, is_right):
    """As of a bias, which the mean of the batch takes away; the kernel has a norm of 1."""
    kernel = np.full((3, 3), 1 / 3)
    reference = {"kernel": kernel, "bias": np.full(4, 1e-7)}
    observed = {"kernel": kernel, "bias": np.float64([size, 0, 0, 0])}
    assert not Tolerance().fits(observed, [(1.0, reference)])
    assert Tolerance(zero=ZERO).fits(observed, [(1.0, reference)]) is is_right
    reference["bias"] = observed["bias"] + 2e-4  # One that is not 0 has to agree.
    assert not Tolerance(zero=ZERO).fits(observed, [(1.0, reference)])


@pytest.mark.parametrize(("unit", "apart"), [(EPS, 0.01), (UNITS["bfloat16"], 0.03)])
def test_what_a_permutation_moves_is_a_part_of_a_gradient_or_8_units(unit, apart):
    reference = {"kernel": np.ones(100)}
    tolerance = Tolerance(times=1.0, unit=unit, spread={"kernel": 1.0})
    for times, is_right in ((0.9, True), (4, False)):
        observed = {"kernel": np.ones(100) * (1 + times * apart)}
        assert tolerance.fits(observed, [(1.0, reference)]) is is_right


@pytest.mark.parametrize(("unit", "apart"), [(EPS, 8e-7), (UNITS["bfloat16"], 3e-3)])
def test_rounding_is_that_of_the_terms_where_they_cancel(unit, apart):
    """Two replicas send gradients of norm 1, whose mean has a norm of 1e-2."""
    reference = {"kernel": np.float64([1e-2, 0, 0, 0])}
    observed = {"kernel": reference["kernel"] + [0, apart, 0, 0]}
    tolerance = Tolerance(times=WITH_SPREAD if unit == EPS else 1.0, unit=unit, of_largest=0.02)
    assert not tolerance.fits(observed, [(1.0, reference)])
    tolerance = dataclasses.replace(tolerance, summed={"kernel": 1.0})
    assert tolerance.fits(observed, [(1.0, reference)])
    assert not tolerance.fits({"kernel": observed["kernel"] * 2}, [(1.0, reference)])


def test_the_bound_of_a_change_ignores_the_difference_of_a_wrong_gradient():
    first, second = np.ones(4), np.array([1, 1 + 1e-6, 1.5, 2])
    agreeing = spread_of(first, second, 1e-4)
    assert agreeing[0] == 0 and agreeing[1] < 2e-6 and np.isinf(agreeing[2:]).all()
    assert spread_of(first, second, 0.0).max() < 1e-5
    allowed = change_by_element(1.0, 1e-7, 0.0, is_weight=True)(first, first, first, agreeing)
    assert allowed[0] < 1e-5 < allowed[1] < 1e-3 and np.isinf(allowed[2:]).all()


def test_rows_with_one_number_are_added():
    assert dense(Rows(np.ones((2, 1)), np.array([1, 1]), 3)).tolist() == [[0], [2], [0]]


def test_values_that_are_not_finite_are_far_unless_both_have_them():
    first, second = np.array([1, np.inf]), np.array([3, np.inf])
    assert distance(second, first) == 2.0
    assert distance(np.array([1, np.nan]), np.array([1, 0])) == np.inf


def test_what_the_reference_does_not_change_may_not_change_by_a_bit():
    assert not of_start(np.zeros(3), np.ones(3), np.zeros(())).any()
    assert of_start(np.ones(3), np.ones(3), np.zeros(())).all()
