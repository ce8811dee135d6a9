"""`lockstep.assert_same_training`: records each variant in processes of its own."""

import functools
import itertools
import json
import os
import pathlib
import shlex
import sys

import numpy as np
import pytest

import lockstep
from lockstep.data.trace import OF_MODULES
from lockstep.running.run import Settings, verify_trainings
from tests.conftest import ROOT
from tests.verifier.recorder_scripts import needs, run_script
from tests.verifier.trainer import BATCH, Script


def record(**options):
    """Writes the recording that `assert_same_training` asks for, of a training with NumPy."""
    given = json.loads(os.environ["LOCKSTEP_RECORD"])
    replay = Script(steps=given["steps"]) if given["replay"] else None
    script = Script(
        **{"steps": given["steps"], "permute": given["permute"], "replay": replay} | options
    )
    script.write(given["path"])


two = functools.partial(record, replicas=2)
not_all_reduced = functools.partial(record, replicas=2, reduce=None)
normalised_by_each_replica = functools.partial(record, replicas=2, local_norm=True)
one_of_two_steps = functools.partial(record, steps=(0,), about={"asked": [0, 1]})


def with_module(factor, script):
    """Adds the arrays of a module, whose gradient by its input has a factor."""
    script.about = {"modules": ("dense",)}
    for position, kind in itertools.product((1, 2), OF_MODULES):
        array = np.random.default_rng(position).normal(size=(BATCH, 3))
        array *= factor if kind == "module_in_grad" else 1
        script.arrays[f"{position}/{kind}/0/0"] = array.astype(np.float32)


def record_modules(factor=1, **options):
    """Records a module, too, if it is asked for."""
    if json.loads(os.environ["LOCKSTEP_RECORD"])["modules"]:
        options["edit"] = functools.partial(with_module, factor)
    record(**options)


def bent(script, replica, gradients):
    return [gradient + np.roll(gradient, 1) ** 2 for gradient in gradients]


wrong_module = functools.partial(record_modules, factor=2, gradient=bent)


def wrong_and_too_large_with_modules():
    if json.loads(os.environ["LOCKSTEP_RECORD"])["modules"]:
        raise MemoryError
    record(gradient=bent)


def wrong_at_times():
    """Is wrong in the first run of a call, whose recordings are in one folder."""
    seen = pathlib.Path(json.loads(os.environ["LOCKSTEP_RECORD"])["path"]).with_name("seen")
    two() if seen.exists() else not_all_reduced()
    seen.touch()


def on_rank_0_of_two():
    if os.environ["RANK"] == "0":
        record(replicas=int(os.environ["WORLD_SIZE"]))


def fails():
    raise RuntimeError("no such device")


def records_nothing():
    print("two GPUs are needed: exiting")


def records_a_part():
    path = pathlib.Path(json.loads(os.environ["LOCKSTEP_RECORD"])["path"])
    path.write_bytes(b"PK")


def run_by_part_in_vain():
    given = json.loads(os.environ["LOCKSTEP_RECORD"])
    assert ("variant1-a" in (given["replay"] or "")) == ("shards" in given)
    if "shards" in given:
        raise ValueError("shards='each': the model returns the loss")
    record()


def command_of(training, file="test_same_training"):
    """Returns the command that runs a training of a file."""
    prepared = f"import sys; sys.path.append({str(ROOT)!r})"
    imported = f"from tests.verifier.{file} import {training} as train"
    return shlex.join([sys.executable, "-c", f"{prepared}; {imported}; print(1); train()"])


def test_the_same_training_passes_under_any_name():
    command = shlex.split(command_of("two"))
    variants = {"../x": two, "reference": command, "a" * 300: (on_rank_0_of_two, 2)}
    verdicts = lockstep.assert_same_training(record, variants)
    assert [*verdicts] == [*variants]
    for verdict in verdicts.values():
        assert verdict.ok and verdict.steps == (0, 1) and verdict.notes == ()


def test_a_variant_that_fails_hides_no_other_and_steps_that_the_reference_lacks_are_told():
    verdicts = verify_trainings(one_of_two_steps, {"a": fails, "two": two}, Settings())
    found = [(verdict.status, verdict.steps) for verdict in verdicts.values()]
    assert found == [("not verified", ()), ("not verified", (0,))]
    told = "a: the training ended with exit code 1: RuntimeError: no such device"
    assert verdicts["a"].missing == (told,)
    lacks = "the reference lacks steps 1, which were to be recorded"
    assert verdicts["two"].missing == (lacks,)


def test_another_training_fails_with_its_cause_and_remedy(tmp_path, capsys):
    path = tmp_path / "new" / "verify.json"
    with pytest.raises(AssertionError) as failed:
        lockstep.assert_same_training(
            record, {"right": two, "wrong": not_all_reduced}, tolerance=1e-4, json_path=path
        )
    text, shown = str(failed.value), capsys.readouterr().out
    assert text.startswith("wrong is not the reference training") and "right is" not in text
    assert "reproducible: a second run" in text and str(path) in text.splitlines()[-1]
    assert "right is" in shown and "wrong is" in shown
    written = json.loads(path.read_text())
    assert written["status"] == "fault" and [*written["trainings"]] == ["right", "wrong"]
    assert written["trainings"]["wrong"]["place"]["node"] == "sum"


@pytest.mark.parametrize("training, told", [
    (wrong_at_times, "not reproducible: a second run"),
    ((fails, 2), "a: the training ended with exit code 1 in process [01]"),
    (records_nothing, r"a: the training recorded nothing; put its steps into .*\n.*are needed"),
    (records_a_part, r"a: the training recorded nothing that can be read \(.*damaged"),
])  # fmt: skip
def test_why_a_training_fails_is_told(tmp_path, training, told):
    path = tmp_path / "verify.json"
    path.write_text("of an earlier test", encoding="utf-8")
    with pytest.raises(AssertionError, match=told):
        lockstep.assert_same_training(record, {"a": training}, tolerance=1e-4, json_path=str(path))
    assert path.exists() == (training is wrong_at_times)


@pytest.mark.parametrize("changes, told", [
    ({"steps": 0}, "steps: 0 are no whole numbers from 0 in ascending order"),
    ({"variants": None}, "variants: None is no object with a name for each training"),
    ({"resumes": {"b": (record,)}}, "resumes: 'b' has no two trainings"),
    ({"resumes": {"a": (record, two)}}, "is a variant's name"),
    ({"variants": {"a": lambda: None}}, "a: .* cannot be sent to another process"),
    ({"variants": {"a": (two, 0)}}, "a: .* is no function and a number of processes"),
    ({"variants": {"a": ""}}, "a: '' is no command"),
    ({"reference": "python 'x"}, "reference: .* is no command and no function"),
    ({"tolerance": -1}, "tolerance: -1 is not at least 0 and less than 1"),
    ({"timeout_sec": 0}, "timeout_sec: 0 is not a positive number"),
])  # fmt: skip
def test_wrong_arguments_are_told_before_anything_runs(changes, told):
    given = {"reference": fails, "variants": {"a": fails}, **changes}
    with pytest.raises(ValueError, match=told) as raised:
        lockstep.assert_same_training(**given)
    assert "\n" not in str(raised.value)


def test_the_reference_is_run_by_part_where_layers_compute_per_replica():
    """Programs of `cases/` have references that can be run so."""
    variants = {"a": normalised_by_each_replica}
    with pytest.raises(AssertionError, match="a was not compared with") as raised:
        lockstep.assert_same_training(run_by_part_in_vain, variants, steps=1, tolerance=1e-4)
    told = " ".join(str(raised.value).split())
    assert "the reference was run once for each rank's part of the batch" in told
    assert "failed: ValueError: shards='each'" in told


def test_the_first_wrong_module_is_named_where_no_mistake_is_known(capsys):
    variants = {"a": wrong_module, "b": wrong_and_too_large_with_modules}
    verdicts = verify_trainings(record_modules, variants, Settings(tolerance=1e-4))
    assert capsys.readouterr().err.count("reference with modules: running") == 1
    for verdict, module in zip(verdicts.values(), ("dense, backward", ""), strict=True):
        assert any(text.startswith("reproducible: ") for text in verdict.remarks)
        assert (verdict.place.node, verdict.place.module) == ("gradient", module)
        assert ("modules" in json.loads(verdict.to_json())["remedy"]) == (not module)


@pytest.mark.slow
@needs("torch")
def test_a_small_gpt_in_five_layouts_is_the_training_of_one_process():
    code = (
        "import runpy; test = runpy.run_path('examples/test_same_training.py');"
        "test['test_two_processes_train_like_one']()"
    )
    done = run_script("torch", "-c", code, cwd=ROOT, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
