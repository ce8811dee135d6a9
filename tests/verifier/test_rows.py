"""Rows name what made an array, and nothing else: random terms, coefficients, groups and orders."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.comparison import verify_alone
from lockstep.data.trace import About, Trace, Variable
from lockstep.explain.rows import Row, choose, computed
from lockstep.explain.solve import solve
from lockstep.numeric.arrays import EPS
from lockstep.numeric.tolerance import WITHOUT_SPREAD, Tolerance

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


def with_noise(named, size):
    noise = arrays(np.random.default_rng([1, 2]), size)  # No other seed draws it.
    return {name: array + noise[name] for name, array in named.items()}


MADE = {  # Row → the sums that each replica receives; `r` is a replica.
    "": lambda raw, share, r: [summed(raw[r:] + raw[:r], share)] * len(raw),
    "not_all_reduced": lambda raw, share, r: raw,
    "lost_replica": lambda raw, share, r: [summed(without(raw, r), share)] * len(raw),
    "repeated_gradient": lambda raw, share, r: [summed([*raw, raw[r]], share)] * len(raw),
    "sum_instead_of_mean": lambda raw, share, r: [summed(raw, 1)] * len(raw),
    "mean_instead_of_sum": lambda raw, share, r: [summed(raw, 1 / len(raw))] * len(raw),
    "scaled_gradient": lambda raw, share, r: [summed(raw, 0.37 * share)] * len(raw),
    "unexplained": lambda raw, share, r: [with_noise(summed(raw, share), 1e-3)] * len(raw),
}  # fmt: skip


@settings(max_examples=80, deadline=None)
@given(SEEDS, st.integers(3, 5), st.sampled_from([*MADE]), st.sampled_from(["mean", "sum"]),
       st.integers(0, 2), st.sampled_from([None, *NAMES]))  # fmt: skip
def test_the_row_that_made_a_sum_is_found_and_no_other(seed, num, cause, reduction, replica, only):
    """All tensors, or one of them, have wrong sums; the sums of others are right in any order."""
    reduction = {"sum_instead_of_mean": "mean", "mean_instead_of_sum": "sum"}.get(cause, reduction)
    random, share = np.random.default_rng(seed), 1 / num if reduction == "mean" else 1.0
    raw = [arrays(random, 1.0 if cause else 10.0 ** random.integers(-6, 6)) for _ in range(num)]
    right, wrong = (MADE[which](raw, share, replica) for which in ("", cause))
    received = [
        {name: (wrong if only in (None, name) else right)[r][name] for name in NAMES}
        for r in range(num)
    ]
    is_part = cause == "not_all_reduced" and only
    expected = "partly_all_reduced" if is_part else cause
    wanted = [(expected, {*NAMES} if only is None else {only})] if cause else []
    assert found(trace_of(raw, received, reduction)) == wanted


def test_a_recording_alone_tells_of_gradients_that_are_not_finite():
    raw = [arrays(np.random.default_rng(seed)) for seed in range(2)]
    raw[1]["bias"][2] = np.inf
    verdict = verify_alone(trace_of(raw, [summed(raw, 0.5)] * 2, "mean"))
    (fault,) = [each for each in verdict.faults if each.stage == "gradients"]
    assert (fault.detail, fault.items) == ("not_finite", ("replica 1",))
    assert "gradients" in verdict.checked
    with pytest.raises(ValueError, match="nothing was recorded"):
        verify_alone(Trace(About("torch", 1, ())))


@settings(max_examples=40, deadline=None)
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


@settings(max_examples=40, deadline=None)
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


@pytest.mark.parametrize("size", [1, 2])
def test_few_elements_select_no_solved_row(size):
    term = {"a": np.arange(1.0, size + 1)}
    assert solve({"a": 3 * term["a"]}, [term])[1].all() == (size > 1)


def test_a_row_that_gives_the_right_arrays_explains_nothing():
    term = {"kernel": np.random.default_rng(0).normal(size=(7, 5))}
    observed = {"kernel": (1 + 1.5 * 2 * WITHOUT_SPREAD * EPS) * term["kernel"]}
    between = {"kernel": (1 + 0.8 * 2 * WITHOUT_SPREAD * EPS) * term["kernel"]}
    rows = [computed("row", "", lambda: between)]
    assert choose(observed, ["kernel"], rows, Tolerance())[0]
    assert choose(observed, ["kernel"], rows, Tolerance(), right=term) == ([], ["kernel"])
