"""A training that resumes from a checkpoint: is it the one that was never interrupted?"""

import json
import os
import shlex
import signal
import sys

import numpy as np
import pytest

import lockstep
from lockstep import trainings
from lockstep.__main__ import main
from lockstep.comparison import compare_traces
from lockstep.launch import TrainingError
from lockstep.resumed import Resumed, first_step_of, renumbered
from lockstep.trainings import Settings, verify_trainings
from tests.conftest import ROOT
from tests.verifier.recorder_scripts import needs
from tests.verifier.script_samples import Script, batch_of

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


TABLE = {  # Name → the resumed process, detail, words of the verdict.
    "right": (changed(nothing), "", ""),
    "right random numbers": (changed(with_random([2, 3])), "", ""),
    "no optimizer state": (changed(remove((*KERNEL, *BIAS))), "not_restored",
        "6 of 6 arrays of optimizer state are 0 or missing"),
    "no step of Adam": (changed(put(STEP, zero)), "not_restored", "2 of 6 arrays of optimizer"),
    "state of an older checkpoint": (changed(put(KERNEL, as_before(1))), "not_restored",
        "3 of 6 arrays of optimizer state as before step 1"),
    "weights not loaded": (changed(put(WEIGHTS, as_before(0))), "not_restored",
        "2 weights as before step 0"),
    "buffers not loaded": (changed(put(BUFFERS, as_before(0))), "not_restored",
        "2 buffers or averages as before step 0"),
    "another value": (changed(put((2,), lambda one, index: as_before(2)(one, index) * 2)),
        "not_restored", "1 buffer or average unlike those of the reference"),
    "random numbers from the start": (changed(with_random([0, 1])), "not_restored",
        "draws random numbers from another state: those of step 0 again"),
    "another seed": (changed(with_random([9, 8])), "not_restored", "others than the reference"),
    "sampler restarted": (changed(nothing, batch=lambda step: batch_of(step % 2)),
        "examples_restarted", "the examples of step 0 of the reference: the order of examples"),
    "loss scale": (changed(nothing, about={"loss_scale": (8.0, 8.0)}), "not_restored",
        "the loss scale of step 2 is 8, in the reference 1"),
}  # fmt: skip


def verdict_of(one, resumed, name=""):
    """Returns the verdict on a resumed process, and its first step."""
    first, own = one.trace(), resumed(one)
    number = first_step_of(first, own, {}, 2)
    own = renumbered(own, number, first)
    verdict = [*compare_traces([renumbered(first, 0, first), own], {}, 1e-5).values()][-1]
    return Resumed(first, own, {}).added_to(verdict), number


@pytest.mark.parametrize("name", TABLE)
def test_what_a_resumed_training_has_lost_is_named(name):
    resumed, detail, told = TABLE[name]
    drawn = "random" in name or "seed" in name
    one = uninterrupted(edit=lambda s: with_random(ALL)(s.arrays, s) if drawn else None)
    verdict, number = verdict_of(one, resumed)
    assert number == 2 and verdict.steps == (2, 3)
    assert {fault.detail for fault in verdict.faults} == ({detail} if detail else set()), verdict
    assert told in " ".join(fault.text for fault in verdict.faults)
    assert verdict.ok == (not detail)


def test_a_learning_rate_of_another_step_is_named():
    one = uninterrupted()
    resumed = changed(nothing)(one)
    names = ["dense/kernel", "dense/bias"]
    groups = [
        ({**one.settings, "learning_rate": rate, "weights": names},)
        for rate in (0.01, 0.005, 0.0025, 0.00125)
    ]
    first = one.trace()
    object.__setattr__(first.about, "settings", tuple(groups))
    object.__setattr__(resumed.about, "settings", (groups[0], groups[1]))
    own = renumbered(resumed, 2, first)
    verdict = [*compare_traces([renumbered(first, 0, first), own], {}, 1e-5).values()][-1]
    (fault,) = Resumed(first, own, {}).added_to(verdict).faults
    assert (fault.detail, fault.steps) == ("other_learning_rate", (2, 3))
    assert fault.text == (
        "the learning rate of step 2 is 0.01, in the reference 0.0025: that of step 0"
    )


def test_a_shard_of_another_replica_is_named():
    def edit(s):
        for position in range(1, len(s.steps) + 1):
            for index in KERNEL[:2]:
                s.arrays[f"{position}/before/1/{index}"] = (
                    s.arrays[f"{position}/before/0/{index}"] * 3 + 1
                )

    one = uninterrupted(replicas=2, edit=edit)
    verdict, _ = verdict_of(one, changed(nothing, replicas=2))
    assert "2 of 6 arrays of optimizer state of another replica" in verdict.faults[0].text


@pytest.mark.parametrize("step", [1, 3])
def test_a_checkpoint_that_is_older_is_found_by_its_weights(step):
    one = uninterrupted()
    own = Script(optimizer="Adam", steps=(step,))
    own.steps = (0,)
    assert first_step_of(one.trace(), own.trace(), {}, 2) == step
    other = Script(optimizer="Adam", steps=(0,), seed=1)
    assert first_step_of(one.trace(), other.trace(), {}, 2) == 2


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
    def edit(script):
        script.arrays["1/before/0/4"] = script.arrays["1/before/0/4"] * 0

    record(start=2, edit=edit)


def test_a_resumed_training_is_compared_as_a_test():
    pairs = {"right": (interrupted, resumed), "killed": (killed, resumed)}
    verdicts = lockstep.assert_same_training(record, resumes=pairs, tolerance=1e-4)
    assert [*verdicts] == [*pairs] and verdicts["right"].steps == (2, 3)
    assert verdicts["right"].notes == ("the resumed training begins with step 2",)
    assert verdicts["killed"].notes == (
        "killed, interrupted: the training was ended by the signal SIGKILL",
        "the resumed training begins with step 2",
    )
    with pytest.raises(AssertionError, match=r"state lost \(not restored\)") as raised:
        lockstep.assert_same_training(
            record, resumes={"a": (interrupted, without_momentum)}, tolerance=1e-4
        )
    assert "1 of 2 arrays of optimizer state are 0 or missing" in str(raised.value)


@pytest.mark.parametrize(
    "first, second, told",
    [
        (killed, late, "a: it resumes with the weights of none of steps 0, 1, 2, 3 of the ref"),
        (killed, killed, "a, resumed: the training was ended by the signal SIGKILL; a, inter"),
    ],
)  # fmt: skip
def test_why_a_training_cannot_be_resumed_is_told(first, second, told):
    with pytest.raises(TrainingError, match=told) as raised:
        verify_trainings(record, {}, Settings(tolerance=1e-4), {"a": (first, second)})
    assert "\n" not in raised.value.text


@pytest.mark.parametrize(
    "changes, told",
    [
        ({}, "variants: None is no object with a name for each training"),
        ({"resumes": {"a": (record,)}}, "resumes: 'a' has no two trainings"),
        ({"variants": {"a": record}, "resumes": {"a": (record, record)}}, "is a variant's name"),
    ],
)
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
    assert training["findings"][0]["text"] == "before step 2, 2 weights as before step 0"
    for wrong, told in (
        (["--resume", "a=true", "true", "--variant", "a=true"], "two have the name a"),
        ([], "--variant or --resume is required"),
    ):
        with pytest.raises(SystemExit):
            main(["run", "--reference=true", *wrong])
        assert told in capsys.readouterr().err


# Frameworks.


@pytest.fixture
def of_scripts(monkeypatch, scripts, tmp_path):
    """Returns a function that verifies resumed trainings of a script of a framework."""

    def verify(package, kinds, *options, processes=1):
        def run(training, variables, log, timeout, update=None):
            code, text = scripts(
                package, f"{package}_resumed.py", *training, *options, folder=tmp_path,
                processes=processes, **variables,
            )  # fmt: skip
            log.write_text(text)
            if code:
                raise TrainingError(f"ended with exit code {code}", text, has_ended=True)

        monkeypatch.setattr(trainings, "run_training", run)
        monkeypatch.setattr(trainings, "require_program", lambda *given: None)
        pairs = {
            kind: (["2", "save=c.pt"], ["4", "load=c.pt", f"without={kind}"]) for kind in kinds
        }
        if "killed" in pairs:
            pairs["killed"] = ["4", "save=c.pt", "kill=2"], pairs["killed"][1]
        return verify_trainings(["4"], {}, Settings(tolerance=1e-5), pairs)

    return verify


def assert_named(verdicts, expected):
    for kind, told in expected.items():
        verdict = verdicts[kind]
        assert verdict.ok == (told is None), verdict
        assert verdict.steps == (2, 3)
        assert told is None or told in verdict.faults[0].text, verdict
        assert len(verdict.faults) == (told is not None), verdict


@pytest.mark.slow
@needs("torch")
def test_resumes_in_pytorch(of_scripts):
    expected = {
        "right": None,
        "killed": None,
        "optimizer": "18 of 18 arrays of optimizer state are 0 or missing",
        "steps": "6 of 18 arrays of optimizer state are 0 or missing",
        "model": "before step 2",
        "buffers": "2 buffers or averages as before step 0",
        "average": "buffers or averages unlike those of the reference",
        "schedule": "rate of step 3 is 0.005, in the reference 0.00125: that of step 1",
        "rate": "the learning rate of step 2 is 0.01, in the reference 0.0025: that of step 0",
        "extra": "the learning rate of step 2 is 0.00125, in the reference 0.0025: that of step 3",
        "scaler": "the loss scale of step 2 is 1024, in the reference 4096",
        "random": "draws random numbers from another state: those of step 0 again",
        "sampler": "the examples of step 0 of the reference: the order of examples begins again",
    }  # fmt: skip
    assert_named(of_scripts("torch", expected, "dropout=1"), expected)
    (order,) = of_scripts("torch", ["order"], "plain=1").values()
    assert order.faults[0].detail == "shifted_state", order


@pytest.mark.slow
@needs("torch")
def test_resumes_of_two_processes(of_scripts):
    expected = {"right": None, "shard": "2 of 4 arrays of optimizer state are 0 or missing"}
    assert_named(of_scripts("torch", expected, "plain=1", "owned=1", processes=2), expected)


@pytest.mark.slow
@needs("jax")
def test_resumes_in_jax(of_scripts):
    expected = {
        "right": None,
        "opt_state": "of optimizer state are 0",
        "key": "1 seed as before step 0",
    }
    assert_named(of_scripts("jax", expected), expected)


@pytest.mark.slow
def test_resumes_in_keras(of_scripts):
    expected = {"right": None, "optimizer": "are 0 or missing", "seeds": "1 seed as before step 0"}
    assert_named(of_scripts("keras", expected), expected)
