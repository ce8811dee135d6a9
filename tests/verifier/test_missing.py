"""What of two recordings was not compared is noted beside a clean verdict."""

import dataclasses

import numpy as np
import pytest

from lockstep.data.trace import STATE, Trace, Variable
from lockstep.engine import verify
from lockstep.engine.verdict import CLEAN, FAULT

from .changes import REPLAYED, WITHOUT_GRADIENTS, pair, replaced, with_variable, zero_in
from .rows import SKIPPED

SQUARE = Variable("dense/bias/square", STATE, of="dense/bias", slot="square")
NOTES = {  # Name → both trainings, and what is noted.
    "nothing": ({}, {}, ""),
    "steps without a change": ({**zero_in(1, 3), "settings": {"momentum": 0.0}}, {},
        "nothing to verify in steps 1, 3: no weight changes"),
    "a weight without a change": ({"clip": lambda replica, g: [g[0], 0 * g[1]]}, {},
        "1 of 2 weights change in no step: dense/bias"),
    "no gradients": (WITHOUT_GRADIENTS, WITHOUT_GRADIENTS, "gradients are not compared: they are"),
    "further steps": ({"steps": (0, 1)}, {"steps": (0, 1, 2)}, "the reference lacks steps 2"),
    "skipped updates": (SKIPPED, {}, "1 updates are skipped, as gradients"),
    "not loaded": ({}, {"about": {**REPLAYED["about"], "not_loaded": ("norm/moving_mean",)}},
        "not loaded by replay=: norm/moving_mean"),
    "state that one recording has": ({}, with_variable(SQUARE, lambda *place: sum(place)),
        "state of optimizers that only one recording has: square"),
    "weights that drift in steps before": ({"steps": (1, 2)},
        replaced(lambda a: a + np.float32(1e-3), 1), "the start of step 1: rounding"),
    "left out": ({}, {"about": {"left_out": ("a queue",)}}, "not compared: a queue"),
}  # fmt: skip


@pytest.mark.parametrize("name", NOTES)
def test_what_was_not_compared_is_noted(name):
    first, second, told = NOTES[name]
    reference, training = pair(first, second)
    verdict = verify(reference.trace(), training.trace("two.npz"))
    assert verdict.status == CLEAN, verdict
    assert any(told in note for note in verdict.notes) if told else not verdict.notes


@pytest.mark.parametrize("trained, status", [(1, CLEAN), (0, FAULT)])
def test_a_replica_that_ends_before_the_first_recorded_step(trained, status):
    """It is noted, and named if it has made no update."""
    reference, training = (each.trace(f"{n}.npz") for n, each in enumerate(pair({}, {}), 1))
    more = {"num_replicas": 3, "replicas": (), "trained": trained}
    about = dataclasses.replace(training.about, **more)
    verdict = verify(reference, Trace(about, training.stored(), training.name))
    assert verdict.status == status, verdict
    if status == FAULT:
        assert verdict.place.ranks == ("replica 2",), verdict
    else:
        told = "replica 2 ended before the first recorded step"
        assert any(told in note for note in verdict.notes), verdict.notes
