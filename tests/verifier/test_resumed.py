"""A training that resumes from a checkpoint: is it the one that was never interrupted?"""

import json
import os
import shlex
import signal
import sys

import numpy as np
import pytest

import lockstep
from lockstep.__main__ import main
from lockstep.engine import verify
from lockstep.engine.resume import first_step_of, renumbered
from lockstep.running.launch import TrainingError
from lockstep.running.run import Settings, verify_trainings
from tests.conftest import ROOT
from tests.verifier import shown
from tests.verifier.changes import scaled
from tests.verifier.trainer import Script, adam, batch_of

ALL = range(4)
# Indices of variables: two weights, two buffers, then 3 arrays of state for each weight.
WEIGHTS, BUFFERS, STEP, KERNEL, BIAS = (0, 1), (2, 3), (6, 9), (4, 5, 6), (7, 8, 9)


def uninterrupted(**options):
    return Script(optimizer="Adam", about={"asked": (*range(9),)}, **options)


def changed(edit, **options):
    """Returns a process that resumes at step 2, and has another state before it."""

    def resumed(one):
        script = Script(
            optimizer="Adam", steps=(2, 3), edit=lambda s: edit(s.arrays, one), **options
        )
        script.steps = (0, 1)  # As the process counts.
        return script.trace("resumed.npz")

    return resumed


def put(places, value):
    """Returns an edit that gives variables the values of `value(one, index)`."""

    def edit(arrays, one):
        for index in places:
            arrays[f"1/before/0/{index}"] = value(one, index)

    return edit


def as_before(step):
    return lambda one, index: one.arrays[f"{step + 1}/before/0/{index}"]


def zero(one, index):
    return np.zeros_like(one.arrays[f"3/before/0/{index}"])


def remove(places):
    def edit(arrays, one):
        for index in places:
            del arrays[f"1/before/0/{index}"]

    return edit


def with_random(state):
    """Returns an edit with the states of a generator that a step draws from."""

    def edit(arrays, one):
        for position, number in enumerate(state, 1):
            arrays[f"{position}/random/0/0"] = np.full(4, number, np.uint8)
            arrays[f"{position}/random_after/0/0"] = np.full(4, number + 1, np.uint8)

    return edit


def nothing(arrays, one):
    pass


RESUMED = {  # Name → the resumed process; the place, what is said.
    "right": (changed(nothing), "", ""),
    "right random numbers": (changed(with_random([2, 3])), "", ""),
    "no optimizer state": (changed(remove((*KERNEL, *BIAS))), "start: state_lost",
        "6 of 6 arrays of optimizer state: 0 or missing"),
    "no step of Adam": (changed(put(STEP, zero)), "start: state_lost",
        "2 of 6 arrays of optimizer state: 0 or missing"),
    "state of an older checkpoint": (changed(put(KERNEL, as_before(1))), "start: state_lost",
        "3 of 6 arrays of optimizer state: as before step 1"),
    "state of another weight": (changed(put((8,), lambda one, i: as_before(2)(one, i - 1))),
        "start: state_lost", "1 of 6 arrays of optimizer state: unlike"),
    "weights not loaded": (changed(put(WEIGHTS, as_before(0))), "start: state_lost",
        "2 of 2 weights: as before step 0"),
    "buffers not loaded": (changed(put(BUFFERS, as_before(0))), "start: state_lost",
        "2 of 2 buffers or averages: as before step 0"),
    "another value": (changed(put((2,), lambda one, i: as_before(2)(one, i) * 2)),
        "start: state_lost", "1 of 2 buffers or averages: unlike those of the reference"),
    "random numbers from the start": (changed(with_random([0, 1])), "random: state_lost",
        "the random states are those of step 0 again"),
    "another seed": (changed(with_random([9, 8])), "random: state_lost",
        "the random states are not those of the reference"),
    "sampler restarted": (changed(nothing, batch=lambda step: batch_of(step % 2)),
        "examples: other_batch_size", "examples are not the reference's"),
    "loss scale": (changed(nothing, about={"loss_scale": (8.0, 8.0)}), "gradient: state_lost",
        "the loss scale is 8, in the reference 1"),
}  # fmt: skip


def verdict_of_resumed(one, resumed):
    """Returns the verdict on a resumed process, and its first step."""
    first, own = one.trace(), resumed(one)
    number = first_step_of(first, own, {}, 2)
    own = renumbered(own, number, first)
    return verify(renumbered(first, 0, first), own, resumed=True), number


@pytest.mark.parametrize("name", RESUMED)
def test_what_a_resumed_training_lacks_is_found_where_it_begins(name):
    resumed, found, told = RESUMED[name]
    draws = "random" in found or name == "right random numbers"
    one = uninterrupted(edit=lambda s: with_random(ALL)(s.arrays, s) if draws else None)
    verdict, number = verdict_of_resumed(one, resumed)
    assert number == 2 and told in verdict.reason and not verdict.error
    assert shown(verdict) == (f"fault: {found}" if found else "clean"), verdict
    assert not found or verdict.place.step == 2


def with_rates(*rates):
    """Returns options of a training with a learning rate of each step."""
    left = iter(rates)

    def update(script, *arrays):
        script.settings = {**script.settings, "learning_rate": next(left)}
        adam(script, *arrays)

    group = {"beta_1": 0.9, "beta_2": 0.999, "epsilon": 1e-7, "weight_decay": 0.0}
    names = ["dense/kernel", "dense/bias"]
    settings = [({**group, "learning_rate": rate, "weights": names},) for rate in rates]
    return update, settings


def test_a_learning_rate_of_another_step_is_found_at_the_update():
    update, settings = with_rates(0.01, 0.005, 0.0025, 0.00125)
    one = uninterrupted(update=update)
    one.about["settings"] = settings
    update, settings = with_rates(0.01, 0.005, 0.01, 0.005)
    verdict, _ = verdict_of_resumed(
        one, changed(nothing, update=update, about={"settings": settings[2:]})
    )
    assert (verdict.place.node, verdict.place.step) == ("update", 2)
    assert verdict.name == "other_learning_rate"


def test_state_of_another_replica_is_found_on_its_rank():
    def edit(script):
        for position in range(1, len(script.steps) + 1):
            for index in KERNEL[:2]:
                name = f"{position}/before/0/{index}"
                script.arrays[name.replace("/0/", "/1/")] = script.arrays[name] * 3 + 1

    verdict, _ = verdict_of_resumed(uninterrupted(replicas=2, edit=edit),
                                    changed(nothing, replicas=2))  # fmt: skip
    assert (verdict.place.node, verdict.place.ranks) == ("start", ("replica 1",))
    assert verdict.place.tensors == ("dense/kernel/exp_avg", "dense/kernel/exp_avg_sq")
    assert "on rank 1 = of another replica" in verdict.formula[0]


@pytest.mark.parametrize("step", [1, 3])
def test_a_checkpoint_that_is_older_is_found_by_its_weights(step):
    own = Script(optimizer="Adam", steps=(step,))
    own.steps = (0,)
    assert first_step_of(uninterrupted().trace(), own.trace(), {}, 2) == step
    other = Script(optimizer="Adam", steps=(0,), seed=1)
    assert first_step_of(uninterrupted().trace(), other.trace(), {}, 2) == 2


# Trainings in processes of their own.


def record(start=0, end=4, edit=lambda script: None):
    """Trains some steps with NumPy, and records those that are asked for."""
    given = json.loads(os.environ["LOCKSTEP_RECORD"])
    steps = given["steps"]
    numbers = [*range(steps)] if isinstance(steps, int) else steps
    numbers = [number for number in numbers if number < end - start]
    own = [start + number for number in numbers]
    script = Script(steps=own, permute=given.get("permute"), edit=edit,
                    replay=Script() if given.get("permute") else None)  # fmt: skip
    script.steps, script.about = numbers, {"trained": end - start}
    script.write(given["path"])


def interrupted():
    record(end=2)


def killed():
    os.kill(os.getpid(), signal.SIGKILL)


def resumed():
    record(start=2)


def late():
    record(start=20, end=22)


def without_weights():
    def edit(script):
        for index in WEIGHTS:
            script.arrays[f"1/before/0/{index}"] = script.states[0][0][index]

    record(start=2, edit=edit)


def without_momentum():
    record(start=2, edit=scaled(0, "before", index=4, position=1)["edit"])


def test_a_resumed_training_is_compared_as_a_test():
    pairs = {"right": (interrupted, resumed), "killed": (killed, resumed)}
    verdicts = lockstep.assert_same_training(record, resumes=pairs, tolerance=1e-4)
    assert [*verdicts] == [*pairs] and verdicts["right"].steps == (2, 3)
    assert verdicts["right"].remarks == ("the resumed training begins with step 2",)
    assert verdicts["killed"].remarks == (
        "killed, interrupted: the training was ended by the signal SIGKILL",
        "the resumed training begins with step 2",
    )
    with pytest.raises(AssertionError, match="step 2") as raised:
        lockstep.assert_same_training(
            record, resumes={"a": (interrupted, without_momentum)}, tolerance=1e-4
        )
    assert "1 of 2 arrays of optimizer state: 0 or missing" in str(raised.value)


@pytest.mark.parametrize("second, told", [
    (late, "a: it resumes with the weights of none of steps 0, 1, 2, 3 of the ref"),
    (killed, "a, resumed: the training was ended by the signal SIGKILL; a, inter"),
])  # fmt: skip
def test_why_a_training_cannot_be_resumed_is_told(second, told):
    with pytest.raises(TrainingError, match=told) as raised:
        verify_trainings(record, {}, Settings(tolerance=1e-4), {"a": (killed, second)})
    assert "\n" not in raised.value.text


@pytest.mark.parametrize("changes, told", [
    ({}, "variants: None is no object with a name for each training"),
    ({"resumes": {"a": (record,)}}, "resumes: 'a' has no two trainings"),
    ({"variants": {"a": record}, "resumes": {"a": (record, record)}}, "is a variant's name"),
])  # fmt: skip
def test_wrong_arguments_are_told_before_anything_runs(changes, told):
    with pytest.raises(ValueError, match=told):
        lockstep.assert_same_training(record, **changes)


def test_lockstep_run_takes_two_commands(capsys):
    prepared = f"import sys; sys.path.append({str(ROOT)!r}); import {__name__} as t"
    reference, first, second = (
        shlex.join([sys.executable, "-c", f"{prepared}; t.{name}()"])
        for name in ("record", "interrupted", "without_weights")
    )
    flags = f"--reference={reference}", "--tolerance=1e-4", "--json"
    assert main(["run", *flags, "--resume", f"late={first}", second]) == 9
    training = json.loads(capsys.readouterr().out)["trainings"]["late"]
    assert training["reason"] == "2 of 2 weights: as before step 0"
    for wrong, told in (
        (["--resume", "a=true", "true", "--variant", "a=true"], "two have the name a"),
        ([], "--variant or --resume is required"),
    ):
        with pytest.raises(SystemExit):
            main(["run", "--reference=true", *wrong])
        assert told in capsys.readouterr().err
