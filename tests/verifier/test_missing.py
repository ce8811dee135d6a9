"""What two recordings lack, and what of them was not compared, is said beside a verdict."""

import dataclasses

import pytest

from lockstep.engine import verify
from lockstep.engine.verdict import CLEAN, NOT_VERIFIED

from .changes import without_bias, zero_in
from .edits import WITHOUT_GRADIENTS
from .recordings import pair
from .script_samples import Script
from .test_sampled import sampled


def about(**changes):
    return {"about": changes}


NOTES = {  # Name → both trainings, and what is noted of a clean one.
    "nothing": ({}, {}, ""),
    "steps without a change": ({**zero_in(1, 3), "settings": {"momentum": 0.0}}, {},
        "nothing to verify in steps 1, 3: no weight changes"),
    "a weight without a change": (without_bias(0, 1), {},
        "1 of 2 weights change in no step: dense/bias"),
    "no gradients": (WITHOUT_GRADIENTS, WITHOUT_GRADIENTS, "gradients are not compared: they are"),
    "further steps": ({"steps": (0, 1)}, {"steps": (0, 1, 2)}, "the reference lacks steps 2"),
    "skipped updates": (about(skipped=1), about(skipped=1), "1 updates are skipped, as gradients"),
    "not loaded": ({}, about(not_loaded=("norm/moving_mean",)),
        "not loaded by replay=: norm/moving_mean"),
    "left out": ({}, about(left_out=("a queue",)), "not compared: a queue"),
}  # fmt: skip


@pytest.mark.parametrize("name", NOTES)
def test_what_was_not_compared_is_noted(name):
    first, second, told = NOTES[name]
    reference, training = pair(first, second)
    verdict = verify(reference.trace(), training.trace("two.npz"))
    assert verdict.status == CLEAN, verdict
    assert any(told in note for note in verdict.notes) if told else not verdict.notes


MISSING = {
    "an exception": ({"ended_with": "KeyError: 'a'"}, "the training ended with an exception: Key"),
    "steps": ({"asked": (*range(6),)}, "the training lacks steps 4, 5, which were to be recorded"),
}  # fmt: skip


@pytest.mark.parametrize("name", MISSING)
def test_a_recording_without_the_whole_training_is_not_verified(name):
    changes, told = MISSING[name]
    reference, training = pair({}, {})
    trace = training.trace("two.npz")
    trace.about = dataclasses.replace(trace.about, **changes)
    verdict = verify(reference.trace(), trace)
    assert verdict.status == NOT_VERIFIED and told in verdict.missing[0]


def test_samples_are_noted():
    first = Script()
    second = Script(replicas=2, replay=first)
    verdict = verify(sampled(first.trace(), 16), sampled(second.trace("two.npz"), 16))
    assert verdict.notes == (
        "larger arrays are compared by 16 of their elements and 8 sums of all",
    )
