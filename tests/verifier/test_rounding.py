"""How far rounding reaches: repetitions of a step, more of them where a gradient is far away."""

import types

import numpy as np
import pytest

from lockstep.numeric.arrays import EPS, MARGIN
from lockstep.oracles import Ask, Computed
from lockstep.oracles.rounding import Drawn, OracleBound, measure, widened

WEIGHT = np.ones(4, np.float32)
FAR = 1e-2  # Change of the gradient if the sign of a ReLU's input changes.


def oracle(units):
    """Computes a gradient that jumps if a weight changes by more than `units`."""

    def compute(ask, *, exactly=False):
        weight = ask.state["w"]
        has_jumped = np.abs(weight - 1).max() > units * EPS
        return Computed([weight * 2], (1.0, 0.0), {"w": weight + FAR * has_jumped}, dict(ask.state))

    return types.SimpleNamespace(unit=EPS, random_layers=(), compute=compute)


@pytest.mark.parametrize("units", [3, 6, 100])
@pytest.mark.parametrize("recorded", ["none", "near", "far"])
def test_a_sign_that_changes_within_the_rounding_of_the_predictions_is_seen(units, recorded):
    ask = Ask({"w": WEIGHT}, [np.zeros((1, 1))], (1.0, 0.0))
    usual = measure(oracle(units), ask, ["w"], seed=0, exactly=False)
    assert usual.gradients["w"] < FAR / 100
    change = {"near": EPS, "far": 6 * EPS}.get(recorded)
    y_pred = [] if change is None else [(2 * WEIGHT * (1 + change)).astype(np.float32)]
    wider = widened(oracle(units), ["w"], usual, y_pred)
    is_seen = wider.drawn["w"].far > FAR
    assert is_seen == (units < (4 if recorded == "near" else MARGIN))
    assert wider._replace(drawn=usual.drawn) == usual


def test_a_gradient_may_move_with_the_signs_and_less_along_itself():
    ask = Ask({"w": WEIGHT}, [np.zeros((1, 1))], (1.0, 0.0))
    right = np.array([1.0, 2.0, -1.0, 1.0])
    usual = measure(oracle(3), ask, ["w"], seed=0, exactly=False)
    step = usual.step._replace(raw={"w": right})
    drawn = {"w": Drawn(far=FAR, along=FAR / 1000)}
    bound = OracleBound([usual.without_ties._replace(step=step, drawn=drawn)])
    across = np.array([2.0, -1.0, 0.0, 0.0]) * FAR / 2
    for gap, is_right in ((across, True), (2 * across, False), (FAR / 10 * right, False)):
        assert bool(bound.near({"w": right + gap}, [(1.0, step.raw)])) == is_right
