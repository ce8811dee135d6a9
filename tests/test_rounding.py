"""How far rounding reaches: repetitions of a step, more of them where a gradient is far away."""

import types

import numpy as np
import pytest

from lockstep.numeric.arrays import EPS, MARGIN
from lockstep.oracles import Ask, Computed
from lockstep.oracles.rounding import measure, widened

WEIGHT = np.ones(4, np.float32)
FAR = 1e-2  # Change of the gradient if the sign of a ReLU's input changes.


def oracle(units):
    """Computes a gradient that jumps if a weight changes by more than `units`."""

    def compute(ask, *, exactly=False):
        weight = ask.state["w"]
        has_jumped = np.abs(weight - 1).max() > units * EPS
        return Computed([weight * 2], (1.0, 0.0), {"w": weight + FAR * has_jumped}, dict(ask.state))

    return types.SimpleNamespace(unit=EPS, random_layers=(), compute=compute)


@pytest.mark.parametrize("units", [3, 100])
@pytest.mark.parametrize("recorded", ["none", "near", "far"])
def test_a_sign_that_changes_within_the_rounding_of_the_predictions_is_seen(units, recorded):
    ask = Ask({"w": WEIGHT}, [np.zeros((1, 1))], (1.0, 0.0))
    usual = measure(oracle(units), ask, ["w"], seed=0, exactly=False)
    assert usual.gradients["w"] < FAR / 100
    change = {"near": EPS, "far": 6 * EPS}.get(recorded)
    y_pred = [] if change is None else [(2 * WEIGHT * (1 + change)).astype(np.float32)]
    wider = widened(oracle(units), ask, ["w"], usual, y_pred)
    is_seen = wider.gradients["w"] > FAR
    assert is_seen == (units < MARGIN and recorded != "near")
    assert wider._replace(gradients=usual.gradients) == usual
