"""Rows name what made an array, and nothing else: random terms, coefficients, groups and orders."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.comparison import verify_alone
from lockstep.data.trace import About, Trace, Variable
from lockstep.explain.rows import Row, choose, computed
from lockstep.explain.solve import solve
from lockstep.numeric.arrays import EPS, UNITS, norm
from lockstep.numeric.tolerance import WITH_SPREAD, WITHOUT_SPREAD, ZERO, Tolerance
from lockstep.oracles import Computed
from lockstep.oracles.rounding import Expected, OracleBound

NAMES = ("kernel", "bias", "scale")
SHAPES = {"kernel": (7, 5), "bias": (5,), "scale": (9,)}
SEEDS = st.integers(0, 2**32 - 1)


def arrays(random, scale=1.0):
    return {
        name: (scale * random.normal(size=shape)).astype(np.float32)
        for name, shape in SHAPES.items()
    }


def summed(parts, share):
    """Returns the sum in float32, in the order of the shards."""
    return {n: np.float32(share) * np.sum([own[n] for own in parts], axis=0) for n in NAMES}


def trace_of(raw, sums, reduction):
    """Returns a recording of one step: what replicas send, and what each receives."""
    variables = tuple(Variable(name, "weight") for name in NAMES)
    about = About(
        "torch", len(raw), steps=(0,), variables=variables, gradients=NAMES, reduction=reduction
    )
    trace = Trace(about)
    for replica, own in enumerate(raw):
        trace.put(0, "raw", replica, [own[name] for name in NAMES])
        trace.put(0, "sums", replica, [sums[replica][name] for name in NAMES])
    return trace


def found(trace):
    return [(finding.detail, {*finding.tensors}) for finding in verify_alone(trace).faults]


def without(parts, lost):
    return [own for replica, own in enumerate(parts) if replica != lost]


MADE = {  # Row → the sums that each replica receives; `r` is a replica.
    "not_all_reduced": lambda raw, share, r: raw,
    "lost_replica": lambda raw, share, r: [summed(without(raw, r), share)] * len(raw),
    "repeated_gradient": lambda raw, share, r: [summed([*raw, raw[r]], share)] * len(raw),
    "sum_instead_of_mean": lambda raw, share, r: [summed(raw, 1)] * len(raw),
    "mean_instead_of_sum": lambda raw, share, r: [summed(raw, 1 / len(raw))] * len(raw),
    "scaled_gradient": lambda raw, share, r: [summed(raw, 0.37 * share)] * len(raw),
}  # fmt: skip


@settings(max_examples=60, deadline=None)
@given(SEEDS, st.integers(3, 5), st.sampled_from(sorted(MADE)), st.data())
def test_the_row_that_made_a_sum_is_found_and_no_other(seed, num, cause, data):
    random = np.random.default_rng(seed)
    raw = [arrays(random) for _ in range(num)]
    means = {"sum_instead_of_mean"}, {"mean_instead_of_sum"}
    reduction = "mean" if cause in means[0] else "sum"
    reduction = data.draw(st.sampled_from(["mean", "sum"])) if cause not in (
        *means[0], *means[1]) else reduction  # fmt: skip
    share = 1 / num if reduction == "mean" else 1.0
    wrong = MADE[cause](raw, share, data.draw(st.integers(0, num - 1)))
    assert found(trace_of(raw, wrong, reduction)) == [(cause, {*NAMES})]


@settings(max_examples=40, deadline=None)
@given(SEEDS, st.integers(2, 5), st.sampled_from(["mean", "sum"]), st.sampled_from(NAMES))
def test_one_tensor_of_a_group_is_found(seed, num, reduction, name):
    random = np.random.default_rng(seed)
    raw = [arrays(random) for _ in range(num)]
    share = 1 / num if reduction == "mean" else 1.0
    right = summed(raw, share)
    lost = {**right, name: summed(without(raw, 1), share)[name]}
    expected = [("lost_replica", {name})]
    assert found(trace_of(raw, [lost] * num, reduction)) == expected


@settings(max_examples=40, deadline=None)
@given(SEEDS, st.integers(2, 5), st.sampled_from(["mean", "sum"]), st.permutations(range(5)))
def test_right_sums_in_any_order_are_clean(seed, num, reduction, order):
    random = np.random.default_rng(seed)
    scale = 10.0 ** random.integers(-6, 6)
    raw = [arrays(random, scale) for _ in range(num)]
    share = 1 / num if reduction == "mean" else 1.0
    moved = [raw[replica] for replica in order if replica < num]
    assert not found(trace_of(raw, [summed(moved, share)] * num, reduction))


@settings(max_examples=40, deadline=None)
@given(SEEDS, st.integers(2, 5), st.sampled_from([1e-5, 1e-3, 0.1]))
def test_a_term_that_nothing_knows_is_unexplained(seed, num, size):
    random = np.random.default_rng(seed)
    raw = [arrays(random) for _ in range(num)]
    right, noise = summed(raw, 1), arrays(random, size)
    other = {name: right[name] + noise[name] for name in NAMES}
    causes = {cause for cause, _ in found(trace_of(raw, [other] * num, "sum"))}
    assert causes == {"unexplained"}


@settings(max_examples=60, deadline=None)
@given(SEEDS, st.integers(1, 4))
def test_solved_coefficients_are_those_that_made_the_array(seed, num):
    random = np.random.default_rng(seed)
    terms = [arrays(random) for _ in range(num)]
    factors = random.normal(size=num)
    made = {
        n: sum(f * np.float64(t[n]) for f, t in zip(factors, terms, strict=True)) for n in NAMES
    }
    solved, known = solve(made, terms)
    assert known.all() and np.allclose(solved, factors, rtol=1e-9)
    again, known = solve(made, [*terms, terms[0]])  # Collinear terms are not determined.
    assert not known[0] and not known[-1] and known[1:-1].all()
    assert np.isclose(again[0] + again[-1], factors[0])


@settings(max_examples=60, deadline=None)
@given(SEEDS, st.floats(0.0, 4.0), st.sampled_from([-1, 1]))
def test_a_coefficient_fits_up_to_the_bound(seed, bounds, sign):
    """Of one tensor, which is the largest of its group: twice its size counts."""
    random = np.random.default_rng(seed)
    term = {"kernel": random.normal(size=(7, 5))}
    factor = 1 + sign * bounds * 2 * WITHOUT_SPREAD * EPS
    observed = {"kernel": factor * term["kernel"]}
    share = Tolerance().shares(observed, [(1.0, term)])["kernel"]
    assert np.isclose(share, bounds, atol=1e-3)
    chosen, left = choose(observed, ["kernel"], [Row("row", "", [(1.0, term)])], Tolerance(), 0)
    assert bool(chosen) == (share <= 1) and bool(left) == (share > 1)


@pytest.mark.parametrize("size", [1, 2, 40])
def test_few_elements_select_no_solved_row(size):
    term = {"a": np.arange(1.0, size + 1)}
    _, known = solve({"a": 3 * term["a"]}, [term])
    assert known.all() == (size > 1)


def test_nothing_is_computed_after_rows_that_explain_all():
    """An oracle needs a step of the model for each row that is computed."""
    random, asked = np.random.default_rng(0), []
    right, observed = arrays(random), arrays(random)

    def row(name, values):
        return computed(name, name, lambda: asked.append(name) or values)

    partly = {"kernel": observed["kernel"]}
    rows = [row("other", right), row("part", partly), row("all", observed), row("last", observed)]
    chosen, left = choose(observed, NAMES, rows, Tolerance(), right=right)
    assert [choice.row.detail for choice in chosen] == ["all"] and not left
    assert asked == ["other", "part", "all"]


def test_a_row_that_gives_the_right_arrays_explains_nothing():
    term = {"kernel": np.random.default_rng(0).normal(size=(7, 5))}
    observed = {"kernel": (1 + 1.5 * 2 * WITHOUT_SPREAD * EPS) * term["kernel"]}
    between = {"kernel": (1 + 0.8 * 2 * WITHOUT_SPREAD * EPS) * term["kernel"]}
    rows = [computed("row", "", lambda: between)]
    assert choose(observed, ["kernel"], rows, Tolerance())[0]
    assert choose(observed, ["kernel"], rows, Tolerance(), right=term) == ([], ["kernel"])


def test_rounding_errors_of_an_oracle_do_not_cancel():
    term = arrays(np.random.default_rng(0))
    measured = {name: 1e-3 * norm(array) for name, array in term.items()}
    step = Expected(Computed([], None, term, {}), EPS, EPS, measured, {})
    near = {name: array + 7e-3 * array for name, array in term.items()}
    assert OracleBound([step]).near(near, [(1.0, term)]) == [*NAMES]
    assert OracleBound([step], 0.5).near(near, [(1.0, term)]) == []
    half = {name: array / 2 for name, array in near.items()}
    assert OracleBound([step, step]).near(half, [(1.5, term), (-1.0, term)]) == [*NAMES]
    assert OracleBound([step]).near(term, [(0.0, term)]) == []


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
