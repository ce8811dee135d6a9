"""`lockstep.assert_same_training`: records each variant in processes of its own."""

import json
import os
import pathlib
import sys
import types

import pytest

import lockstep
from lockstep import trainings
from tests.conftest import ROOT
from tests.verifier.recorder_scripts import needs, run_script
from tests.verifier.script_samples import Script


def record(**options):
    """Writes the recording that `assert_same_training` asks for, of a training with NumPy."""
    given = json.loads(os.environ["LOCKSTEP_RECORD"])
    replay = Script(steps=given["steps"]) if given["replay"] else None
    script = Script(
        **{"steps": given["steps"], "permute": given["permute"], "replay": replay} | options
    )
    script.write(given["path"])


def one():
    record()


def two():
    record(replicas=2)


def one_of_two_steps():
    """A training that ends early, or whose second step skips the update."""
    record(steps=(0,), about={"asked": [0, 1]})


def not_all_reduced():
    record(replicas=2, reduce=None)


def is_first_run():
    """Whether no other training of this call has asked; its recordings are in one folder."""
    seen = pathlib.Path(json.loads(os.environ["LOCKSTEP_RECORD"])["path"]).with_name("seen")
    is_first = not seen.exists()
    seen.touch()
    return is_first


def wrong_at_times():
    not_all_reduced() if is_first_run() else two()


def records_once():
    if is_first_run():
        not_all_reduced()


def on_rank_0_of_two():
    if os.environ["RANK"] == "0":
        record(replicas=int(os.environ["WORLD_SIZE"]))


def fails():
    raise RuntimeError("no such device")


def records_nothing():
    pass


def records_a_part():
    path = pathlib.Path(json.loads(os.environ["LOCKSTEP_RECORD"])["path"])
    path.write_bytes(b"PK")


def normalised_by_each_replica():
    record(replicas=2, local_norm=True)


def run_by_part():
    """A reference that records once more for the parts of the batch of a recorded variant."""
    given = json.loads(os.environ["LOCKSTEP_RECORD"])
    assert given.get("shards") in (None, "each")
    assert ("variant1-a" in (given["replay"] or "")) == ("shards" in given)
    record()


def run_by_part_in_vain():
    if "shards" in json.loads(os.environ["LOCKSTEP_RECORD"]):
        raise ValueError("shards='each': the model returns the loss")
    record()


def test_the_same_training_passes_under_any_name():
    code = f"import sys; sys.path.append({str(ROOT)!r}); import {__name__} as t; t.two()"
    command = [sys.executable, "-c", code]
    variants = {"../x": two, "reference": command, "a" * 300: (on_rank_0_of_two, 2)}
    verdicts = lockstep.assert_same_training(one, variants)
    assert [*verdicts] == [*variants]
    for verdict in verdicts.values():
        assert verdict.ok and verdict.steps == (0, 1) and verdict.notes == ()


def test_steps_that_the_reference_lacks_are_not_verified():
    verdicts = trainings.verify_trainings(one_of_two_steps, {"two": two}, trainings.Settings())
    assert verdicts["two"].steps == (0,) and not verdicts["two"].faults
    (why,) = verdicts["two"].unverified
    assert why == "the first recording's training ended before step 1, which were to be recorded"


@pytest.mark.slow
def test_a_loop_of_keras_on_two_devices(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    script = str(ROOT / "tests" / "verifier" / "zoo" / "scripts" / "keras_loop.py")
    one, two = ([sys.executable, script, number, "unused.npz"] for number in "12")
    verdicts = lockstep.assert_same_training(one, {"two": two})
    assert verdicts["two"].status == "clean" and verdicts["two"].num_replicas == 2
    with pytest.raises(AssertionError, match="modules: cannot be recorded in this framework"):
        lockstep.assert_same_training(one, {"two": two}, modules=True)


def test_another_training_fails_with_its_cause_and_remedy(tmp_path, capsys):
    path = tmp_path / "new" / "verify.json"
    with pytest.raises(AssertionError) as failed:
        lockstep.assert_same_training(
            one, {"right": two, "wrong": not_all_reduced}, tolerance=1e-4, json_path=path
        )
    text, shown = str(failed.value), capsys.readouterr().out
    assert text.startswith("wrong is not the reference training: not all-reduced\n")
    assert "\n  remedy  call the wrapped model, ddp(x) and not ddp.module(x)" in text
    assert "\n  +       output = ddp(x)\n" in text and "right" not in text
    assert "wrong: reproducible: a second run from the same states has the same faults" in text
    assert text.splitlines()[-1].endswith(f"sizes: on standard output and in {path}")
    assert shown.startswith(
        "right is the reference training: every checked stage is clean\nwrong is not"
    )
    assert "\n  all-reduce      fault: " in shown
    record = json.loads(path.read_text())
    assert record["status"] == "fault" and [*record["trainings"]] == ["right", "wrong"]
    assert "wrong: " + record["trainings"]["wrong"]["notes"][-1] in text


@pytest.mark.parametrize(
    "training, told",
    [
        (wrong_at_times, "not reproducible: a second run"),
        (records_once, "a, second run: the training recorded nothing"),
        (fails, r"a: the training ended with exit code 1\n(.*\n)+RuntimeError: no such device"),
        ((fails, 2), "a: the training ended with exit code 1 in process [01]"),
        (records_nothing, "a: the training recorded nothing; put its steps into `with lockstep"),
        (records_a_part, r"a: the training recorded nothing that can be read \(.*damaged"),
    ],
)
def test_why_a_training_fails_is_told(tmp_path, training, told):
    path = tmp_path / "verify.json"
    path.write_text("of an earlier test", encoding="utf-8")
    with pytest.raises(AssertionError, match=told):
        lockstep.assert_same_training(one, {"a": training}, tolerance=1e-4, json_path=str(path))
    assert path.exists() == (training is wrong_at_times)


@pytest.mark.parametrize(
    "changes, told",
    [
        ({"steps": 0}, "steps: 0 are no whole numbers from 0 in ascending order"),
        ({"steps": [1, 0]}, r"steps: \[1, 0\] are no whole numbers from 0"),
        ({"steps": 1.5}, r"steps: 1\.5 are no whole numbers from 0"),
        ({"variants": {}}, "variants: {} is no object with a name for each training"),
        ({"variants": {"a": lambda: None}}, "a: .* cannot be sent to another process"),
        ({"variants": {"a": (two, 0)}}, "a: .* is no function and a number of processes"),
        ({"variants": {"a": ""}}, "a: '' is no command"),
        ({"reference": "python 'x"}, "reference: .* is no command and no function"),
        ({"tolerance": -1}, "tolerance: -1 is not at least 0 and less than 1"),
        ({"timeout_sec": 0}, "timeout_sec: 0 is not a positive number"),
    ],
)
def test_wrong_arguments_are_told_before_anything_runs(changes, told):
    given = {"reference": fails, "variants": {"a": fails}, **changes}
    with pytest.raises(ValueError, match=told) as raised:
        lockstep.assert_same_training(**given)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    "reference, note",
    [
        (run_by_part, "the reference was run once for each replica's part of the batch"),
        (
            run_by_part_in_vain,
            "the reference could not be run once for each replica's part of the batch: ValueError:"
            " shards='each': the model returns the loss",
        ),
    ],
)
def test_the_reference_is_run_by_part_where_layers_compute_per_replica(reference, note):
    variants = {"a": normalised_by_each_replica}
    with pytest.raises(AssertionError, match="a: not compared with") as raised:  # Statistics.
        lockstep.assert_same_training(reference, variants, steps=1, tolerance=1e-4)
    assert f"a: {note}" in str(raised.value)


@pytest.mark.parametrize(
    "detail, status, expected",
    [
        ("random_layers", "not compared", True),
        ("local_statistics", "fault", False),
        ("update_not_seen", "not compared", False),
    ],
)
def test_which_verdicts_need_a_reference_by_part(detail, status, expected):
    finding = types.SimpleNamespace(detail=detail, status=status, stage="forward")
    verdict = types.SimpleNamespace(status="fault", findings=[finding])
    assert trainings.computes_per_replica(verdict) is expected
    assert not trainings.computes_per_replica(verdict, ["gradients"])


@pytest.mark.slow
@needs("torch")
def test_a_small_gpt_in_five_layouts_is_the_training_of_one_process():
    code = (
        "import runpy; test = runpy.run_path('examples/test_same_training.py');"
        "test['test_two_processes_train_like_one']()"
    )
    done = run_script("torch", "-c", code, cwd=ROOT, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.slow
@needs("torch")
def test_a_fault_behind_layers_that_compute_per_replica_is_found(tmp_path):
    script = ROOT / "tests" / "verifier" / "recorder_scripts" / "torch_per_replica.py"
    two = f"torchrun --nproc_per_node=2 {script}"
    done = run_script(
        *("torch", "-m", "lockstep", "run", "--json", "--tolerance=1e-5"),
        *(f"--reference=python {script}", f"--variant=right={two}"),
        *(f"--variant=wrong={two} wrong",),
        cwd=tmp_path, timeout=300,
    )  # fmt: skip
    assert done.returncode == 9, done.stderr[-3000:]
    trainings = json.loads(done.stdout)["trainings"]
    right = trainings["right"]
    assert (right["status"], right["findings"]) == ("clean", [])
    assert any("on replicas other than 0" in note for note in right["notes"])
    wrong = trainings["wrong"]["findings"][0]
    assert (wrong["detail"], wrong["stage"]) == ("scaled_gradient", "loss")
    assert wrong["items"] == ["replica 1"] and "count 1, 1.01 times" in wrong["text"]
    note = "the reference was run once for each replica's part of the batch"
    assert all(note in training["notes"] for training in trainings.values())


@pytest.mark.slow
@needs("torch")
@pytest.mark.parametrize(
    "kind, module, told",
    [
        ("detached", "1, backward", ""),
        ("detached drawn", "1, backward", ""),
        ("hooked", "", "hooks, sums over devices, and changes by the script"),
        ("short", "", "the first wrong one is named"),
    ],
)
def test_the_first_wrong_module_is_named_where_no_mistake_is_known(tmp_path, kind, module, told):
    script = ROOT / "tests" / "verifier" / "recorder_scripts" / "torch_unexplained.py"
    done = run_script(
        *("torch", "-m", "lockstep", "run", "--json", f"--keep={tmp_path}"),
        f"--reference=python {script} {'drawn' if 'drawn' in kind else ''}",
        f"--variant=a=python {script} {kind}",
        f"--variant=b=python {script} {kind}",
        cwd=tmp_path, timeout=300,
    )  # fmt: skip
    assert done.returncode == 9, done.stderr[-3000:]
    assert done.stderr.count("reference with modules: running") == 1
    for training in json.loads(done.stdout)["trainings"].values():
        assert any(note.startswith("reproducible: ") for note in training["notes"])
        start, first = [None, *training["findings"]][-2:]
        assert (start or {}).get("detail") == ("other_initial_weights" if "drawn" in kind else None)
        assert first["stage"] == "gradients" and first.get("module", "") == module
        assert first["remedy"].endswith(told)
        assert ("modules" in first["remedy"]) == (kind == "short")
