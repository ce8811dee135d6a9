"""How far rounding reaches: in gradients, in their sums, and in what an update changes."""

import dataclasses

import numpy as np
import pytest

from lockstep.numeric import arrays
from lockstep.numeric.arrays import EPS, UNITS
from lockstep.numeric.state_bounds import of_change, of_start, spread_of
from lockstep.numeric.tolerance import WITH_SPREAD, ZERO, Tolerance, gap_of
from lockstep.oracles.rules import Rule, _updated_by_blocks, updated


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
    allowed = of_change(first, first, first, agreeing, unit=1e-7, is_weight=True, mixes=0.0)
    assert allowed[0] < 1e-5 < allowed[1] < 1e-3 and np.isinf(allowed[2:]).all()


def test_a_gradient_that_cancels_the_momentum_may_differ_in_its_last_place():
    """Adam's second step: of 1,000 changes, that of one weight is 1e-5 of the usual one."""

    def change(gradient):
        momentum = np.float32(0.1) * gradient + np.float32(0.9) * momenta
        return (1e-3 * momentum / np.abs(momenta)).astype(np.float64)

    momenta = np.full(1000, 1.6e-5, np.float32)
    gradient = np.full(1000, 1e-4, np.float32)
    gradient[0] = -9 * momenta[0] * np.float32(1 + 1e-5)
    other = np.nextafter(gradient, np.float32(0))
    first, second, size = change(gradient), change(other), np.full(1000, 1e-6)
    spread = spread_of(gradient, other, 1e-4)
    assert 0 < spread.max() <= EPS and abs(first[0]) < 1e-4 * abs(first[1])
    allowed = of_change(first, second, size, spread, unit=EPS, is_weight=True, mixes=0.0)
    assert (np.abs(second - first) <= allowed).all() and (allowed < 1e-5 * first[1]).all()
    assert np.abs(second - first)[0] > 64 * EPS * np.abs(first[0])


def test_what_the_reference_does_not_change_may_not_change_by_a_bit():
    assert not of_start(np.zeros(3), np.ones(3), np.zeros(())).any()
    assert of_start(np.ones(3), np.ones(3), np.zeros(())).all()


@pytest.mark.parametrize("size", [0, 1, 4, 11])
def test_blocks_give_what_whole_arrays_give_also_in_the_last_one(monkeypatch, size):
    monkeypatch.setattr(arrays, "_BLOCK", 4)
    first = np.arange(1, size + 1, dtype=np.float32)
    second = first.copy()
    second[-1:] += 2
    far = 2.0 if size else 0.0
    assert arrays.distance(second, first) == far
    assert arrays.norm(second) == pytest.approx(np.linalg.norm(second), rel=1e-12)
    whole = arrays.by_blocks(lambda a, b: a * b, first, second)
    assert np.array_equal(whole, first.astype(np.float64) * second)
    gap = gap_of(second, [(1.0, first)])
    assert gap and (gap.length, gap.num) == (far, size)
    sizes = [arrays.norm(second), arrays.norm(first)]
    assert [gap.actual, gap.value] == pytest.approx(sizes, rel=1e-12)
    assert gap.product == pytest.approx(far * float(np.sum(first[-1:])))
    if size:
        factor = np.sum(second * first) / np.sum(first * first)
        assert arrays.factor_of([second], [first]) == pytest.approx(factor)
        assert arrays.distance(np.append(first, np.nan), np.append(first, 0)) == np.inf
        assert arrays.distance(np.append(second, np.inf), np.append(first, np.inf)) == far


@pytest.mark.parametrize("family", ["SGD", "Adam"])
@pytest.mark.parametrize("size", [0, 1, 11])
def test_a_rule_updates_blocks_as_it_updates_whole_weights(monkeypatch, family, size):
    monkeypatch.setattr(arrays, "_BLOCK", 4)
    rule = Rule(family=family, learning_rate=0.1, momentum=0.9, weight_decay=0.01)
    weight, gradient, state = np.random.default_rng(0).normal(size=(3, size))
    given = weight, gradient, {"velocity": state, "first_moment": state, "number": 3.0}
    found, right = _updated_by_blocks(rule, *given), updated(rule, *given)
    assert found.keys() == right.keys()
    assert all(np.array_equal(found[role], right[role]) for role in right)
