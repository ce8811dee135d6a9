"""The data set of silent bugs: its heads, what is expected of its programs, and its runner."""

import json
import os
import re
import signal
import subprocess
import sys
import tarfile
import time

import jsonschema
import numpy as np
import pytest

from cases import __main__ as command
from cases import heads, runner, table
from cases.tools import lockstep as tool
from cases.tools import plain
from lockstep.answer.names import NAMES
from tests.conftest import ROOT, processes_of, wait_until

ALL = heads.read_cases()
CASES = {case.id: case for case in ALL}
SCHEMA = json.loads((heads.FOLDER / "schema.json").read_text("utf-8"))
VALIDATOR = jsonschema.validators.validator_for(SCHEMA)(SCHEMA)
RECORDINGS = ROOT / "tests" / "recordings.tar.xz"
DICE = "losses/batch_dice"
RIGHT = f"{DICE}.right"


@pytest.fixture(autouse=True)
def read_once(monkeypatch):
    """The command does not read all heads again, which takes a second."""
    monkeypatch.setattr(command, "read_cases", lambda: ALL)


# --- Heads and results ---------------------------------------------------------------------------


@pytest.mark.parametrize("kind", sorted({case.kind for case in ALL}))
def test_heads_say_what_the_schema_asks_for(kind):
    for case in [case for case in ALL if case.kind == kind]:
        right = {name: form for name, form in case.right.items() if name != heads.RIGHT}
        VALIDATOR.validate({**case.head, "right": right, "wrong": case.wrong})
        assert case.path.exists() and case.title.endswith("."), case.id
        for name, form in case.variants.items():
            compile(case.source(name), f"{case.id}.{name}", "exec")
            ranks = form.get("place", {}).get("ranks", "all")
            number = form.get("processes", case.head["processes"])
            assert ranks == "all" or max(ranks) < number, f"{case.id}.{name}"


def test_all_results_are_those_of_the_programs_that_there_are():
    forms = {f"{case.id}.{name}" for case in ALL for name in case.variants}
    assert {*heads.read_lines(heads.FOLDER / tool.RESULTS)} == forms
    assert {*heads.read_lines(heads.FOLDER / plain.RESULTS)} <= forms
    wrong = {f"{case.id}.{name}" for case in ALL for name in case.wrong}
    names = table.accepted_names()
    assert {*names} <= wrong and {name for each in names.values() for name in each} <= {*NAMES, ""}


def test_the_page_has_the_tables_of_the_results(capsys):
    table.main()
    assert capsys.readouterr().out.strip() in (ROOT / "docs" / "cases.md").read_text("utf-8")


def test_cases_are_chosen_by_name_kind_framework_number_and_seed():
    def ids(*words, cases=ALL, **options):
        return [case.id for case, _ in heads.choose(cases, words, **options)]

    assert ids("losses") == [name for name in CASES if name.startswith("losses/")]
    thirds, some = ids(every=3), ALL[::2]
    assert len(CASES) / 4 < len(thirds) < len(CASES) / 2
    # Another program changes no other program's part.
    assert ids(cases=some, every=3) == [case.id for case in some if case.id in thirds]
    drawn = ids(number=5, seed=1)
    assert len(drawn) == 5 and drawn == ids(number=5, seed=1) != ids(number=5, seed=2)
    assert [names for _, names in heads.choose(ALL, [RIGHT])] == [["right"]]
    assert {CASES[each].head["framework"] for each in ids(framework="jax")} == {"jax"}
    with pytest.raises(ValueError, match="losses/no_such: no kind, case or form"):
        ids("losses/no_such")


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        ("framework =", "frame =", "has no framework"),
        ('"torch"', '"pytorch"', "framework is 'pytorch', and none of torch, jax"),
        ("losses/", "loss/", "its head has the id loss/batch_dice"),
        ("place = {", "plaice = {", "[wrong.ratio_of_each_rank] has no place"),
        ("steps = 2", "steps =", "its head is no TOML"),
        ("import os\n", "import\n", "invalid syntax"),
    ],
)
def test_a_wrong_head_is_refused_with_its_file(tmp_path, old, new, told):
    path = tmp_path / f"{DICE}.py"
    path.parent.mkdir()
    path.write_text(CASES[DICE].path.read_text("utf-8").replace(old, new))
    with pytest.raises(ValueError, match=re.escape(told)) as error:
        heads.read_case(path)
    assert str(path) in str(error.value)


def test_a_patch_replaces_a_text_of_the_program_once(monkeypatch, tmp_path):
    monkeypatch.setattr(heads, "FOLDER", tmp_path)
    (tmp_path / "name.py").write_text('"""Trains x = 1."""\n\nx = 1\ny = 2\ny = 2\n')
    forms = {name: {"patch": [[name, "z = 3"]]} for name in ("x = 1", "y = 2", "Trains")}
    case = heads.Case("name", "", {}, {}, forms)
    assert case.source("x = 1") == '"""Trains x = 1."""\n\nz = 3\ny = 2\ny = 2\n'
    for name, number in (("y = 2", 2), ("Trains", 0)):
        with pytest.raises(ValueError, match=f"{number} times in the program, not once: {name}"):
            case.source(name)


# --- The command ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    """The folder of some recordings, made by `make recordings`."""
    folder = tmp_path_factory.mktemp("kept")
    with tarfile.open(RECORDINGS) as archive:
        archive.extractall(folder, filter="data")
    return folder


def kept_cases(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.glob("*/*"))


def test_kept_recordings_are_judged_as_expected(kept, capsys):
    code = command.main([*kept_cases(kept), f"--keep={kept}", "--kept"])
    printed = capsys.readouterr().out
    assert code == 0, printed
    assert int(re.search(r"(\d+) forms", printed)[1]) >= 175
    assert command.main(["losses/two_players", f"--keep={kept}", "--kept"]) == 3
    assert "has no recording of losses/two_players as it is now" in capsys.readouterr().err


def test_a_changed_line_of_what_is_expected_fails(kept, tmp_path, monkeypatch, capsys):
    lines = heads.read_lines(heads.FOLDER / tool.RESULTS)
    case = kept_cases(kept)[0]
    changed = next(key for key in lines if key.startswith(case) and not key.endswith(".right"))
    lines[changed]["node"] = "elsewhere"
    heads.write_lines(tmp_path / tool.RESULTS, lines)
    monkeypatch.setattr(command, "FOLDER", tmp_path)
    assert command.main([case, f"--keep={kept}", "--kept"]) == 9
    printed = capsys.readouterr().out
    assert f"DIFFERS {changed}: " in printed and "1 not as expected" in printed


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--every=0"], "--every must be greater than 0 and at most 1000000, got 0"),
        (["ports", "--framework=jax"], "no program has these names and options"),
        (["no_such"], "no_such: no kind, case or form"),
        (["--kept"], "--kept needs --keep=DIR"),
        (["--keep="], "the name of a folder is empty"),
        (["--timeout_sec=nan"], "--timeout_sec must be greater than 0"),
    ],
)
def test_wrong_arguments_are_refused(arguments, told, capsys):
    with pytest.raises(SystemExit) as error:
        command.main(arguments)
    assert error.value.code == 2 and told in capsys.readouterr().err


def test_damaged_files_of_results_and_folders_in_use_are_refused(tmp_path, monkeypatch, capsys):
    (tmp_path / tool.RESULTS).write_text('{"variant": "a/b.c"}\n{"variant"')
    monkeypatch.setattr(command, "FOLDER", tmp_path)
    arguments = [DICE, f"--keep={tmp_path}/kept", "--kept"]
    with runner.Runner(tmp_path / "kept"):
        assert command.main(arguments) == command.main(arguments[:1]) == 3
    told = capsys.readouterr().err
    assert "kept is used by another run" in told
    assert f"{tool.RESULTS}:2: no line of results" in told


def test_update_writes_verdicts_and_leaves_the_rest(tmp_path, monkeypatch, capsys):
    other, gone = "losses/two_players.right", "losses/gone.right"
    lines = {key: {"variant": key, "status": "fault"} for key in (other, gone)}
    heads.write_lines(tmp_path / tool.RESULTS, lines)
    monkeypatch.setattr(command, "FOLDER", tmp_path)
    said = {"variant": RIGHT, "status": "refused"}  # No verdict, which is never expected.
    monkeypatch.setattr(tool, "judge", lambda *_: iter([{**said, "text": ""}]))
    assert command.main([RIGHT, "--update"]) == 9
    assert f"DIFFERS {RIGHT}: status refused" in capsys.readouterr().out
    assert heads.read_lines(tmp_path / tool.RESULTS) == {other: lines[other]}
    said["status"] = "clean"
    assert command.main([RIGHT]) == 9
    assert command.main([RIGHT, "--update"]) == 0
    assert heads.read_lines(tmp_path / tool.RESULTS) == {other: lines[other], RIGHT: said}
    assert command.main([RIGHT]) == 0


def test_an_interpreter_that_does_not_work_ends_all(monkeypatch, capsys):
    for python, told in (("/bin/false", "cannot import torch"), ("/none", "No such file")):
        monkeypatch.setenv("CASES_TORCH_PYTHON", python)
        assert command.main([RIGHT]) == 3
        assert told in capsys.readouterr().err


# Programs that do not end, and need no framework.
ENDLESS = """
import sys
from cases import __main__, heads, runner
runner.PRELOADED["torch"] = ("json",)
heads.Case.source = lambda *_: "import time; print('up', flush=True); time.sleep(600)"
sys.exit(__main__.main(sys.argv[1:]))
"""


def test_a_signal_ends_the_runner_and_its_programs(tmp_path):
    arguments = ["losses/batch_dice", "losses/two_players", f"--keep={tmp_path}/kept"]
    process = subprocess.Popen(
        [sys.executable, "-c", ENDLESS, *arguments], cwd=ROOT, stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL, env={**os.environ, "TMPDIR": str(tmp_path)},
    )  # fmt: skip
    try:
        wait_until(lambda: any(p.stat().st_size for p in tmp_path.glob("kept/*/*/*/log.txt")))
        assert len(processes_of(tmp_path)) > 2  # The runner, a server and a program.
        process.terminate()
        assert process.wait(20) == 128 + signal.SIGTERM
    finally:
        process.kill()
    assert not processes_of(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["kept"]


# --- Runs of a program ---------------------------------------------------------------------------


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Runs a program's text by a runner whose server imports no framework."""
    monkeypatch.setitem(runner.PRELOADED, "torch", ("json",))
    said = []

    def run_text(source, timeout_sec=60, keep=tmp_path / "kept", **more):
        spec = {
            "case": "kind/name", "framework": "torch", "source": source, "bug": "",
            "processes": 1, "arguments": [], "launched": False, "own_weights": False, **more,
        }  # fmt: skip
        training = ["python", json.dumps(spec)]
        with runner.Runner(keep, say=said.append) as running:
            running.run(
                training, str(tmp_path / "one.npz"), {"tool": "plain"},
                lambda path: {"CASES_TOOL": "plain", "CASES_OUT": path}, timeout_sec,
            )  # fmt: skip

    run_text.said = said
    return run_text


def test_a_program_that_hangs_ends_at_the_limit(run):
    start = time.monotonic()
    with pytest.raises(runner.FailedRunError, match="did not end"):
        run("import time; time.sleep(600)", timeout_sec=1)
    assert time.monotonic() - start < 60 and "did not end, and is run again" in run.said[0]


def test_all_ranks_are_waited_for_and_one_that_fails_ends_the_others(run, tmp_path):
    last = "import os, time\nif os.environ['RANK'] == '1':\n    "
    run(f"{last}time.sleep(1)\nopen(f\"out.rank{{os.environ['RANK']}}.npz\", 'w')", processes=2)
    assert sorted(path.name for path in tmp_path.glob("one*")) == ["one.rank0.npz", "one.rank1.npz"]
    with pytest.raises(runner.FailedRunError, match="exit code 5"):
        run(f"{last}os._exit(5)\ntime.sleep(600)", processes=2)


def test_an_abort_in_native_code_is_run_again_once_and_said(run, tmp_path):
    runs = tmp_path / "runs"
    source = f"import os\nopen({str(runs)!r}, 'a').write('x')\n"
    with pytest.raises(runner.FailedRunError, match="aborted in native code"):
        run(f"{source}os.abort()")
    assert runs.stat().st_size == 2 and len(run.said) == 1
    run(f"{source}os.path.getsize({str(runs)!r}) > 3 or os.abort()")
    assert "aborted in native code, and is run again" in run.said[1] and len(run.said) == 2


def test_a_disk_that_is_full_or_cannot_be_written_ends_all(run, tmp_path):
    (tmp_path / "file").touch()
    full = "with open('/dev/full', 'w') as file: file.write('x')"
    for source, keep, told, code in (
        (full, tmp_path / "kept", "No space left on device", 8),
        ("", tmp_path / "file", "File exists", 3),
    ):
        with pytest.raises(runner.CannotRunError, match=told) as error:
            run(source, keep=keep)
        assert error.value.code == code


def test_a_run_whose_recording_is_damaged_is_run_again(run, tmp_path):
    runs = tmp_path / "runs"
    source = (
        f"import os\nopen({str(runs)!r}, 'a').write('x')\n"
        "open(os.environ['CASES_OUT'], 'w').write('recorded')"
    )
    run(source)
    run(source)
    assert runs.read_text() == "x"
    (end,) = tmp_path.glob("kept/kind/name/*/end.json")
    for damaged in (end, end.with_name("out.npz")):
        damaged.write_text("[")
        run(source)
    assert runs.read_text() == "xxx"


def test_what_a_program_has_started_ends_with_it(run, tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    with pytest.raises(runner.FailedRunError, match="exit code 5"):
        run("import subprocess, sys\nsubprocess.Popen(['sleep', '60'])\nsys.exit(5)")
    wait_until(lambda: not processes_of(tmp_path), timeout_sec=5)


# --- Tools ---------------------------------------------------------------------------------------


def arrays(weight, losses=(1.0,), **state):
    state = {f"state/{name}": np.asarray(value) for name, value in state.items()}
    return {"weights/w": np.asarray(weight), "losses": np.asarray(losses), **state}


@pytest.mark.parametrize(
    ("copies", "weights"),
    [
        ([[1.0, 2.0, 2.0]], 0.0),
        ([[1.0, 2.0, 2.0], [1.0, 2.0, 2.3]], 0.3 / 10.29**0.5),  # Of one rank.
        ([[1.0], [2.0, 2.0]], 0.0),  # Parts of a weight, in the order of ranks.
        ([[[1.0, 2.0, 2.0], [1.0, 2.0, 2.0]]], 0.0),  # Copies of `jax.pmap`.
        ([[1.0, 2.0, float("nan")]], 1e300),
        ([[1.0, 2.0]], None),  # No part of it, and no copy.
    ],
)
def test_final_weights_are_compared_on_all_ranks(copies, weights):
    one = arrays([[1.0, 2.0, 2.0]] if isinstance(copies[0][0], list) else [1.0, 2.0, 2.0])
    found = plain.distances([one], [arrays(copy) for copy in copies])
    assert found["loss"] == 0
    assert found["weights"] == (weights if weights is None else pytest.approx(weights, rel=0.01))


@pytest.mark.parametrize(
    ("ranks", "loss"),
    [
        (([3.0, 1.0], [5.0, 3.0]), 0.0),  # Their mean is that of the reference,
        (([3.0, 1.0], [1.0, 1.0]), 0.0),  # or their sum.
        (([3.0, 1.0], [6.0, 3.0]), 0.5 / 4.5),
        (([1.0, 1.0, 1.0],), None),
    ],
)
def test_losses_of_ranks_are_a_mean_or_a_sum(ranks, loss):
    one = [arrays([1.0], losses=[4.0, 2.0])]
    found = plain.distances(one, [arrays([1.0], losses=each) for each in ranks])["loss"]
    assert found == (loss if loss is None else pytest.approx(loss))


def test_state_is_compared_and_what_is_not_finite_is_told():
    one, other = arrays([1.0], m=[1.0]), arrays([1.0], m=[2.0])
    found = plain.distances([one], [one, other])
    assert found == {"weights": 0.0, "state": 0.5, "loss": 0.0, "finite": True}
    assert not plain.distances([one], [arrays([1.0], m=[np.inf])])["finite"]


def test_a_form_has_other_weights_where_it_had_equal_ones():
    was = {"weights": 1e-7, "state": None, "loss": 0.0, "finite": True}
    assert not plain.differs(was, {**was, "weights": 9e-5, "loss": 1.0})
    for change in ({"weights": 2e-4}, {"state": 2e-4}, {"finite": False}):
        assert plain.differs(was, {**was, **change}) and plain.differs({**was, **change}, was)


class NoRunner:
    """Runs nothing: each training ends with its number as its weight, or with an error."""

    timeout_sec = 60

    def __init__(self, error=None, number=1):
        self._error, self._number, self._weight = error, number, 0.0

    def trainings_of(self, case, name):
        return [["python", '{"own_weights": false}']] * (1 + self._number)

    def run(self, training, path, options, variables, limit):
        if self._error:
            raise self._error
        self._weight += 1
        np.savez(path, **{"weights/w": [self._weight], "losses": [1.0]})


@pytest.mark.parametrize("which", [tool, plain])
def test_a_run_that_failed_is_no_verdict(which, tmp_path):
    for error in (runner.FailedRunError("ended with exit code 1", "tail"), ValueError("why")):
        (line,) = which.judge(CASES[DICE], ["right"], NoRunner(error=error), tmp_path)
        assert line["status"] == "refused" and str(error).splitlines()[0] in line["text"]
    nowhere = NoRunner(error=runner.CannotRunError("x"))
    with pytest.raises(runner.CannotRunError):
        [*which.judge(CASES[DICE], ["right"], nowhere, tmp_path)]


def test_final_weights_are_those_of_the_last_run(tmp_path):
    case = CASES[DICE]
    (line,) = plain.judge(case, ["right"], NoRunner(number=2), tmp_path)
    assert line["weights"] == 0.66667  # 1.0 of the reference, 3.0 of the last run.
    port = case._replace(head={**case.head, "mode": "port"})
    (line,) = plain.judge(port, ["right"], NoRunner(), tmp_path)
    assert line["weights"] == 0.5 and line["loss"] is None
