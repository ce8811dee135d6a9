"""A training that resumes from a checkpoint: is it the one that was never interrupted?"""

import functools
import json
import os
import signal

import numpy as np
import pytest

import lockstep
from lockstep.__main__ import main
from lockstep.engine import verify
from lockstep.engine.resume import first_step_of, renumbered
from lockstep.running.launch import TrainingError
from lockstep.running.run import Settings, verify_trainings
from tests.verifier import shown
from tests.verifier.changes import scaled
from tests.verifier.test_same_training import command_of
from tests.verifier.trainer import Script

# Indices of variables: two weights, two buffers, then 3 arrays of state for each weight.
WEIGHTS, STEP, KERNEL, BIAS = (0, 1), (6, 9), (4, 5, 6), (7, 8, 9)


def with_random(script, states):
    """Adds states of a generator, from which each step draws."""
    for position, number in enumerate(states, 1):
        script.arrays[f"{position}/random/0/0"] = np.full(4, number, np.uint8)
        script.arrays[f"{position}/random_after/0/0"] = np.full(4, number + 1, np.uint8)


def verdict_of_resumed(change=lambda arrays, one: None, random=None, first=None, **options):
    """Returns the verdict on a process that resumes at step 2.

    `change` changes its arrays, and `random` are states of its generator; `first` are further
    options of the uninterrupted training, and `options` those of the resumed process.
    """
    one = Script(
        optimizer="Adam", about={"asked": (*range(9),)}, **(first or {}),
        edit=lambda script: with_random(script, range(4) if random else ()),
    )  # fmt: skip
    own = Script(optimizer="Adam", steps=(2, 3), **options)
    with_random(own, random or ())
    change(own.arrays, one.arrays)
    own.steps = (0, 1)  # As the process counts.
    trace, reference = own.trace("resumed.npz"), one.trace()
    number = first_step_of(reference, trace, {}, 2)
    assert number == 2
    trace = renumbered(trace, number, reference)
    return verify(renumbered(reference, 0, reference), trace, resumed=True)


def as_before(step, places, moved=0, times=1):
    """Makes variables those of a step of the reference: of the same or of another variable."""

    def change(arrays, one):
        for index in places:
            own = one[f"{step + 1}/before/0/{index + moved}"]
            arrays[f"1/before/0/{index}"] = (own * times).astype(own.dtype)

    return {"change": change}


def without(arrays, one):
    for index in (*KERNEL, *BIAS):
        del arrays[f"1/before/0/{index}"]


LOST = "start: state_lost"
RESUMED = {  # Name → what is changed in the resumed process; the place, what is said.
    "right": ({}, "", ""),
    "right random numbers": ({"random": [2, 3]}, "", ""),
    "no optimizer state": ({"change": without}, LOST,
        "6 of 6 arrays of optimizer state: 0 or missing"),
    "no step of Adam": (as_before(2, STEP, times=0), LOST,
        "2 of 6 arrays of optimizer state: 0 or missing"),
    "state of an older checkpoint": (as_before(1, KERNEL), LOST,
        "3 of 6 arrays of optimizer state: as before step 1"),
    "state of another weight": (as_before(2, (8,), moved=-1), LOST,
        "1 of 6 arrays of optimizer state: unlike"),
    "another value": (as_before(2, (2,), times=2), LOST,
        "1 of 2 buffers or averages: unlike those of the reference"),
    "random numbers from the start": ({"random": [0, 1]}, "random: state_lost",
        "the random states are those of step 0 again"),
    "another seed": ({"random": [9, 8]}, "random: state_lost",
        "the random states are not those of the reference"),
    "loss scale": ({"about": {"loss_scale": (8.0, 8.0)}}, "gradient: state_lost",
        "the loss scale is 8, in the reference 1"),
}  # fmt: skip


@pytest.mark.parametrize("name", RESUMED)
def test_what_a_resumed_training_lacks_is_found_where_it_begins(name):
    changes, found, told = RESUMED[name]
    verdict = verdict_of_resumed(**changes)
    assert told in verdict.reason and not verdict.error
    assert shown(verdict) == (f"fault: {found}" if found else "clean"), verdict
    assert not found or verdict.place.step == 2


def test_state_of_another_replica_is_found_on_its_rank():
    def change(arrays, one):
        for name in [name for name in arrays if name.startswith("1/before/1/")]:
            if int(name[-1]) in KERNEL[:2]:
                one[name.replace("1/", "3/", 1)] = 3 * one[name.replace("1/", "3/", 1)] + 1

    verdict = verdict_of_resumed(change, first={"replicas": 2}, replicas=2)
    assert (verdict.place.node, verdict.place.ranks) == ("start", ("replica 1",))
    assert verdict.place.tensors == ("dense/kernel/exp_avg", "dense/kernel/exp_avg_sq")
    assert "on rank 1 = of another replica" in verdict.formula[0]


@pytest.mark.parametrize("step", [1, 3])
def test_a_checkpoint_that_is_older_is_found_by_its_weights(step):
    one = Script(optimizer="Adam").trace()
    for changes, number in (({}, step), ({"seed": 1}, 2)):
        own = Script(optimizer="Adam", steps=(step,), **changes)
        own.steps = (0,)
        assert first_step_of(one, own.trace(), {}, 2) == number


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


def killed():
    os.kill(os.getpid(), signal.SIGKILL)


def with_first_weights(script):
    for index in WEIGHTS:
        script.arrays[f"1/before/0/{index}"] = script.states[0][0][index]


def without_momentum():
    record(start=2, edit=scaled(0, "before", index=4, position=1)["edit"])


interrupted = functools.partial(record, end=2)
resumed = functools.partial(record, start=2)
late = functools.partial(record, start=20, end=22)
without_weights = functools.partial(record, start=2, edit=with_first_weights)


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


def test_lockstep_run_takes_two_commands(capsys):
    names = "record", "interrupted", "without_weights"
    reference, first, second = (command_of(name, "test_resumed") for name in names)
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
