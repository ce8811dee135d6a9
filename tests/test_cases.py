"""The data set of silent bugs: its heads, what is expected of its programs, and its runner."""

import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import tarfile
import time
import tomllib

import jsonschema
import numpy as np
import pytest

from cases import __main__ as command
from cases import heads, runner, table
from cases.tools import lockstep as tool
from cases.tools import plain
from lockstep.answer.names import NAMES
from lockstep.engine.verdict import Place, Verdict
from lockstep.running import run as trainings
from tests.conftest import ROOT

CASES = heads.read_cases()
SCHEMA = json.loads((heads.FOLDER / "schema.json").read_text("utf-8"))
# Their mistakes are parts of names, as of options.
IN_OTHER_WORDS = {"ports/small_cnn", "trainers/deepspeed_engine", "losses/chunked_logits"}
RECORDINGS = ROOT / "tests" / "recordings.tar.xz"
BATCH_DICE = "losses/batch_dice"


@pytest.mark.parametrize("kind", sorted({case.kind for case in CASES}))
def test_heads_say_what_the_schema_asks_for(kind):
    for case in [case for case in CASES if case.kind == kind]:
        right = {name: form for name, form in case.right.items() if name != heads.RIGHT}
        jsonschema.validate({**case.head, "right": right, "wrong": case.wrong}, SCHEMA)
        assert case.path.exists() and case.title.endswith("."), case.id
        program = case.path.read_text("utf-8").rpartition("\n[")[2]  # Without its head.
        named = [f'"{name}"' in program for name in case.wrong if "patch" not in case.wrong[name]]
        # The last one may be what is left, as after `if not BUG`.
        assert case.id in IN_OTHER_WORDS or named.count(False) <= 1, case.id
        for name, form in case.variants.items():
            compile(case.source(name), f"{case.id}.{name}", "exec")
            ranks = form.get("place", {}).get("ranks", "all")
            number = form.get("processes", case.head["processes"])
            assert ranks == "all" or max(ranks) < number, f"{case.id}.{name}"


def test_all_results_are_those_of_the_programs_that_there_are():
    forms = {f"{case.id}.{name}" for case in CASES for name in case.variants}
    assert {*heads.read_lines(heads.FOLDER / tool.RESULTS)} == forms
    assert {*heads.read_lines(heads.FOLDER / plain.RESULTS)} <= forms
    wrong = {f"{case.id}.{name}" for case in CASES for name in case.wrong}
    names = table.accepted_names()
    used = {name for each in names.values() for name in each}
    assert {*names} <= wrong and used <= {*NAMES, ""}


def test_the_page_has_the_tables_of_the_results(capsys):
    table.main()
    assert capsys.readouterr().out.strip() in (ROOT / "docs" / "cases.md").read_text("utf-8")


def test_cases_are_chosen_by_name_kind_framework_number_and_seed():
    def ids(*words, **options):
        return [case.id for case, _ in heads.choose(CASES, words, **options)]

    losses = ids("losses")
    assert len(losses) > 20 and all(each.startswith("losses/") for each in losses)
    thirds = ids("losses", every=3)
    assert {*thirds} < {*losses} and 4 < len(thirds) < 16
    # Another program changes no other program's part.
    assert [case.id for case, _ in heads.choose(CASES[::2], ["losses"], every=3)] == [
        each for each in thirds if each in {case.id for case in CASES[::2]}
    ]
    drawn = ids(number=5, seed=1)
    assert len(drawn) == 5 and drawn == ids(number=5, seed=1) != ids(number=5, seed=2)
    assert [names for _, names in heads.choose(CASES, ["losses/batch_dice.right"])] == [["right"]]
    assert {case.head["framework"] for case in CASES if case.id in ids(framework="jax")} == {"jax"}
    with pytest.raises(ValueError, match="losses/no_such: no kind, case or form"):
        ids("losses/no_such")


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
    names = kept_cases(kept)
    code = command.main([*names, f"--keep={kept}", "--kept"])
    printed = capsys.readouterr().out
    assert code == 0, printed
    assert int(re.search(r"(\d+) forms", printed)[1]) >= 40


def test_a_changed_line_of_what_is_expected_fails(kept, tmp_path, monkeypatch, capsys):
    lines = heads.read_lines(heads.FOLDER / tool.RESULTS)
    case = kept_cases(kept)[0]
    changed = next(key for key in lines if key.startswith(case) and not key.endswith(".right"))
    lines[changed]["node"] = "elsewhere"
    heads.write_lines(tmp_path / tool.RESULTS, lines)
    monkeypatch.setattr(command, "FOLDER", tmp_path)
    assert command.main([case, f"--keep={kept}", "--kept"]) == 9
    printed = capsys.readouterr().out
    assert f"DIFFERS {changed}: " in printed and "node elsewhere" in printed
    assert "1 not as expected" in printed


def test_what_is_not_kept_is_not_judged(kept, capsys):
    code = command.main(["losses/two_players", f"--keep={kept}", "--kept"])
    assert code == 3
    assert "has no recording of losses/two_players as it is now" in capsys.readouterr().err


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Runs a program's text by a runner whose server imports no framework."""
    monkeypatch.setitem(runner.PRELOADED, "torch", ("json",))
    said = []

    def run_text(source, timeout_sec=60, keep=None, name="one", options=None, **more):
        spec = {
            "case": "kind/name", "framework": "torch", "source": source, "bug": "",
            "processes": 1, "arguments": [], "launched": False, "own_weights": False, **more,
        }  # fmt: skip
        training = ["python", json.dumps(spec)]
        with runner.Runner(keep or tmp_path / "kept", say=said.append) as running:
            running.run(
                training, str(tmp_path / f"{name}.npz"), {"tool": "plain", **(options or {})},
                lambda path: {"CASES_TOOL": "plain", "CASES_OUT": path}, timeout_sec,
            )  # fmt: skip
        return said

    run_text.said = said
    return run_text


def test_a_program_that_hangs_ends_at_the_limit(run):
    start = time.monotonic()
    with pytest.raises(runner.FailedRunError, match="did not end"):
        run("import time; time.sleep(600)", timeout_sec=1)
    assert time.monotonic() - start < 60 and "did not end, and is run again" in run.said[0]


def test_a_rank_that_fails_ends_the_others(run):
    source = "import os, sys, time\nsys.exit(5) if os.environ['RANK'] == '1' else time.sleep(600)"
    with pytest.raises(runner.FailedRunError, match="exit code 5"):
        run(source, processes=2)


def test_an_abort_in_native_code_is_run_again_and_said(run, tmp_path):
    mark = tmp_path / "mark"
    first = f"import os\nif not os.path.exists({str(mark)!r}):\n"
    run(f"{first}    open({str(mark)!r}, 'w')\n    os.abort()")
    assert "aborted in native code, and is run again" in run.said[0] and len(run.said) == 1
    with pytest.raises(runner.FailedRunError, match="aborted in native code"):
        run("import os; os.abort()")


def test_a_full_disk_ends_all(run, tmp_path):
    with pytest.raises(runner.CannotRunError, match="No space left on device") as error:
        run("with open('/dev/full', 'w') as file: file.write('x')")
    assert error.value.code == 8


def test_a_folder_that_cannot_be_written_ends_all(run, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(runner.CannotRunError, match="File exists") as error:
        run("", keep=tmp_path / "file")
    assert error.value.code == 3


@pytest.mark.parametrize("damage", ["end.json is gone", "end.json", "out.npz"])
def test_a_run_whose_recording_is_damaged_is_run_again(run, tmp_path, damage):
    source = f"""
import os
open({str(tmp_path / "runs")!r}, 'a').write('x')
open(os.environ['CASES_OUT'], 'w').write('recorded')
"""
    run(source)
    run(source)
    assert (tmp_path / "runs").read_text() == "x"
    (end,) = tmp_path.glob("kept/kind/name/*/end.json")
    if damage == "end.json is gone":
        end.unlink()
    else:
        end.with_name(damage).write_text("[")
    run(source)
    assert (tmp_path / "runs").read_text() == "xx"


def test_what_a_library_prints_is_no_answer(run, tmp_path, monkeypatch):
    (tmp_path / "chatty.py").write_text("print('hello')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    program = tmp_path / "program.py"
    program.write_text("import sys\nsys.exit(3)")
    request = {
        "program": str(program), "arguments": [], "folder": str(tmp_path), "processes": 0,
        "log": str(tmp_path / "log"), "environment": {}, "timeout_sec": 60,
    }  # fmt: skip
    server = runner.Server(sys.executable, ["chatty"], [str(tmp_path)])
    assert [server.run(request), server.run(request)] == [3, 3]
    server.end()
    with pytest.raises(runner.CannotRunError, match=r"cannot import no_such: .*No module named"):
        runner.Server(sys.executable, ["no_such"]).run(request)


def test_an_interpreter_that_does_not_work_ends_all(monkeypatch, capsys):
    for python, told in (("/bin/false", "cannot import torch"), ("/none", "No such file")):
        monkeypatch.setenv("CASES_TORCH_PYTHON", python)
        assert command.main(["losses/batch_dice.right"]) == 3
        assert told in capsys.readouterr().err


def children_of(process):
    listed = subprocess.run(["ps", "-e", "-o", "pid=,ppid="], capture_output=True, text=True)
    pairs = [tuple(map(int, line.split())) for line in listed.stdout.splitlines()]
    found = [process.pid]
    for parent in found:
        found += [child for child, own in pairs if own == parent]
    return found[1:]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_the_runner_and_its_programs(tmp_path, number):
    arguments = ["keras/scalar_loss", "keras/fit_per_epoch", "keras/sync_batch_norm"]
    process = subprocess.Popen(
        [sys.executable, "-m", "cases", *arguments, f"--keep={tmp_path}/kept"], cwd=ROOT,
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        env={**os.environ, "TMPDIR": str(tmp_path)},
    )  # fmt: skip
    try:
        end = time.monotonic() + 120
        while not (logs := [*tmp_path.glob("kept/*/*/*/log.txt")]) and time.monotonic() < end:
            time.sleep(0.1)
        assert logs
        left = children_of(process)
        process.send_signal(number)
        assert process.wait(20) == 128 + number
    finally:
        process.kill()
    assert left and not [pid for pid in left if os.path.exists(f"/proc/{pid}")]
    assert [path.name for path in tmp_path.iterdir()] == ["kept"]


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--every=0"], "--every must be greater than 0 and at most 1000000, got 0"),
        (["--number=-1"], "--number must be greater than 0 and at most 1000000, got -1"),
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


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        ("framework =", "frame =", "has no framework"),
        ('mode = "pair"', "", "has no mode"),
        ('"torch"', '"pytorch"', "framework is 'pytorch', and none of torch, jax"),
        ("losses/", "loss/", "its head has the id loss/batch_dice"),
        ("place = {", "plaice = {", "[wrong.ratio_of_each_rank] has no place"),
        ("steps = 2", "steps =", "its head is no TOML"),
        ("import os\n", "import\n", "invalid syntax"),
    ],
)
def test_a_wrong_head_is_refused_with_its_file(tmp_path, old, new, told):
    text = (heads.FOLDER / "losses" / "batch_dice.py").read_text("utf-8")
    path = tmp_path / "losses" / "batch_dice.py"
    path.parent.mkdir()
    path.write_text(text.replace(old, new))
    with pytest.raises(ValueError, match=re.escape(told)) as error:
        heads.read_case(path)
    assert str(path) in str(error.value)


def test_a_patch_replaces_a_text_of_the_program_once(monkeypatch, tmp_path):
    monkeypatch.setattr(heads, "FOLDER", tmp_path)
    (tmp_path / "kind").mkdir()
    (tmp_path / "kind" / "name.py").write_text('"""Trains x = 1."""\n\nx = 1\ny = 2\ny = 2\n')
    forms = {name: {"patch": [[name, "z = 3"]]} for name in ("x = 1", "y = 2", "Trains")}
    case = heads.Case("kind/name", "", {}, {}, forms)
    assert case.source("x = 1") == '"""Trains x = 1."""\n\nz = 3\ny = 2\ny = 2\n'
    for name, number in (("y = 2", 2), ("Trains", 0)):
        with pytest.raises(ValueError, match=f"{number} times in the program, not once: {name}"):
            case.source(name)


def test_damaged_files_of_results_and_folders_in_use_are_refused(tmp_path, monkeypatch, capsys):
    (tmp_path / tool.RESULTS).write_text('{"variant": "a/b.c"}\n{"variant"')
    with runner.Runner(tmp_path / "kept"):
        assert command.main(["losses/batch_dice", f"--keep={tmp_path}/kept", "--kept"]) == 3
    assert "kept is used by another run" in capsys.readouterr().err
    monkeypatch.setattr(command, "FOLDER", tmp_path)
    assert command.main(["losses/batch_dice", f"--keep={tmp_path}/kept", "--kept"]) == 3
    assert f"{tool.RESULTS}:2: no line of results" in capsys.readouterr().err


def test_a_form_without_a_verdict_fails_and_is_never_expected(tmp_path, monkeypatch, capsys):
    def judge(case, names, runner, folder):
        yield {"variant": f"{case.id}.right", "status": "refused", "text": "why"}

    monkeypatch.setattr(tool, "judge", judge)
    monkeypatch.setattr(command, "FOLDER", tmp_path)
    for more in ([], ["--update"]):
        assert command.main(["losses/batch_dice.right", *more]) == 9
        assert "DIFFERS losses/batch_dice.right: status refused" in capsys.readouterr().out
    assert not heads.read_lines(tmp_path / tool.RESULTS)


def arrays(weight, losses=(1.0,), **state):
    state = {f"state/{name}": np.asarray(value) for name, value in state.items()}
    return {"weights/w": np.asarray(weight), "losses": np.asarray(losses), **state}


@pytest.mark.parametrize(
    ("copies", "weights", "loss"),
    [
        ([[1.0, 2.0, 2.0]], 0.0, 0.0),
        ([[1.0, 2.0, 2.0], [1.0, 2.0, 2.3]], 0.3 / 10.29**0.5, 0.0),  # Of one rank.
        ([[1.0], [2.0, 2.0]], 0.0, 0.0),  # Parts of a weight, in the order of ranks.
        ([[2.0], [1.0, 2.0]], 2**0.5 / 3, 0.0),
        ([[[1.0, 2.0, 2.0], [1.0, 2.0, 2.0]]], 0.0, 0.0),  # Copies of `jax.pmap`.
        ([[1.0, 2.0, float("nan")]], 1e300, 0.0),
        ([[1.0, 2.0]], None, 0.0),  # No part of it, and no copy.
    ],
)
def test_final_weights_are_compared_on_all_ranks(copies, weights, loss):
    one = arrays([[1.0, 2.0, 2.0]] if isinstance(copies[0][0], list) else [1.0, 2.0, 2.0])
    found = plain.distances([one], [arrays(copy) for copy in copies])
    assert found["loss"] == loss
    assert found["weights"] == (weights if weights is None else pytest.approx(weights, rel=0.01))


def test_losses_of_ranks_are_a_mean_or_a_sum():
    one = [arrays([1.0], losses=[4.0, 2.0])]
    for ranks, loss in (([3.0, 1.0], [5.0, 3.0]), 0.0), (([3.0, 1.0], [1.0, 1.0]), 0.0), (
        ([3.0, 1.0], [6.0, 3.0]), 0.5 / 4.5,
    ):  # fmt: skip
        found = plain.distances(one, [arrays([1.0], losses=each) for each in ranks])
        assert found["loss"] == pytest.approx(loss)
    # A run that was resumed has the last losses; another number cannot be compared.
    assert plain.distances(one, [arrays([1.0], losses=[2.0])])["loss"] == 0
    assert plain.distances(one, [arrays([1.0], losses=[1.0, 1.0, 1.0])])["loss"] is None


def test_a_table_counts_alarms_places_and_names():
    case = next(case for case in CASES if case.id == "losses/batch_dice")
    form = "losses/batch_dice.ratio_of_each_rank"
    fault = {"status": "fault", "node": "loss", "step": 0, "name": "no_such"}
    lines = {"losses/batch_dice.right": {"status": "clean"}, form: fault}
    far = {"losses/batch_dice.right": {"weights": 2e-4, "loss": 0.0}, form: {"loss": 0.1}}
    right, wrong = (line for line in table.score([case], lines, far) if line.startswith("| all"))
    assert right == "| all | 1 | 0 | 1 | 0 |"
    row = "| all | 1 | 1 (100 %) | 0 (0 %), 1 not compared | 1 (100 %) | 1 (100 %) | 0 (0 %) |"
    assert wrong == row
    lines[form] = {**fault, "step": 1, "name": table.accepted_names()[form][0]}
    lines["losses/batch_dice.right"] = {**fault}
    right, wrong = (line for line in table.score([case], lines, {}) if line.startswith("| all"))
    assert right == "| all | 1 | – | – | 1 |"
    assert wrong == "| all | 1 | – | – | 1 (100 %) | 0 (0 %) | 1 (100 %) |"
    lines[form] = {"status": "not compared"}
    row = "| all | 1 | – | – | 0 (0 %), 1 not compared | 0 (0 %) | 0 (0 %) |"
    assert table.score([case], lines, {})[-1] == row


def test_a_program_is_run_again_once(run, tmp_path):
    runs = tmp_path / "runs"
    with pytest.raises(runner.FailedRunError, match="aborted in native code"):
        run(f"import os\nopen({str(runs)!r}, 'a').write('x')\nos.abort()")
    assert runs.stat().st_size == 2 and len(run.said) == 1


def test_a_run_that_failed_is_run_again_without_what_it_wrote(run, tmp_path):
    source = (
        f"import os, sys\nif os.path.exists({str(tmp_path / 'mark')!r}):\n"
        "    sys.exit(open('out.npz', 'w').close())\n"
        f"open({str(tmp_path / 'mark')!r}, 'w').close()\n"
        "open('out.rank1.npz', 'w').close()\nsys.exit(4)"
    )
    with pytest.raises(runner.FailedRunError, match="exit code 4"):
        run(source)
    run(source)
    assert [path.name for path in tmp_path.glob("one*")] == ["one.npz"]


def test_a_form_is_compared_with_the_reference_that_its_head_names(tmp_path):
    with runner.Runner(tmp_path) as running:
        for case in CASES:
            for name, form in case.variants.items():
                commands = running.trainings_of(case, name)
                reference, *own = [json.loads(text) for _, text in commands]
                is_patched = form.get("reference") == "patched"
                if "original" not in case.head:
                    source = case.source(name if is_patched else "right")
                    assert reference["source"] == source, (case.id, name)
                by_patch = name in case.right or "patch" in form
                assert {each["bug"] for each in own} == {"" if by_patch else name}, (case.id, name)
                assert reference["bug"] == (own[0]["bug"] if is_patched else "")
                assert reference["processes"] == 1 and not reference["own_weights"]
                assert all(each["own_weights"] == form.get("own_weights", False) for each in own)
                assert [each.get("checkpoint") for each in own] == (
                    ["SAVE", "LOAD"] if case.head["mode"] == "resume" else [None]
                )


@pytest.mark.parametrize("package", ["json", "no_such_package"])
def test_a_case_that_needs_a_missing_package_is_left_out(package, monkeypatch, tmp_path, capsys):
    case = next(case for case in CASES if case.id == BATCH_DICE)
    needs = case._replace(head={**case.head, "requires": [package]})
    monkeypatch.setattr(command, "read_cases", lambda: [needs])
    monkeypatch.setattr(tool, "judge", lambda *_: iter(()))
    monkeypatch.setenv("CASES_TORCH_PYTHON", sys.executable)
    assert command.main([]) == (3 if package == "no_such_package" else 0)
    told = f"{BATCH_DICE}: left out, needs {package}" in capsys.readouterr().out
    assert told == (package == "no_such_package")


def test_a_program_gets_its_mistake_arguments_and_group(run, tmp_path):
    source = (
        "import os, sys\n"
        f"file = {str(tmp_path)!r} + '/seen' + os.environ['RANK']\n"
        "names = 'BUG', 'DEVICES', 'WORLD_SIZE', 'CASES_TOOL'\n"
        "print(*(os.environ[name] for name in names), *sys.argv[1:], file=open(file, 'w'))"
    )
    run(source, bug="mistake", processes=2, arguments=["--flag"])
    seen = [(tmp_path / f"seen{rank}").read_text() for rank in (0, 1)]
    assert seen == ["mistake 2 2 plain --flag\n"] * 2


def test_a_form_resumes_from_its_own_checkpoint(run, tmp_path):
    for bug in ("", "mistake", "another"):
        run("import os; open(os.environ['SAVE'], 'w').write(os.environ['BUG'])",
            bug=bug, checkpoint="SAVE")  # fmt: skip
    for bug in ("another", "mistake", ""):
        run("import os; assert open(os.environ['LOAD']).read() == os.environ['BUG']",
            bug=bug, checkpoint="LOAD")  # fmt: skip


def test_all_ranks_are_waited_for(run, tmp_path):
    source = (
        "import os, time\nif os.environ['RANK'] == '1':\n    time.sleep(1)\n"
        "open(f\"out.rank{os.environ['RANK']}.npz\", 'w').close()"
    )
    run(source, processes=2)
    assert sorted(path.name for path in tmp_path.glob("one*")) == ["one.rank0.npz", "one.rank1.npz"]


def test_what_a_program_has_started_ends_with_it(run, tmp_path):
    source = (
        "import subprocess, sys\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])\n"
        f"open({str(tmp_path / 'pid')!r}, 'w').write(str(child.pid))\nsys.exit(5)"
    )
    with pytest.raises(runner.FailedRunError, match="exit code 5"):
        run(source)
    stat = pathlib.Path(f"/proc/{(tmp_path / 'pid').read_text()}/stat")
    end = time.monotonic() + 5
    while stat.exists() and stat.read_text().split()[2] != "Z":
        assert time.monotonic() < end
        time.sleep(0.05)


@pytest.mark.parametrize(
    ("last", "code"),
    [("sys.exit('text')", 1), ("sys.exit(7)", 7), ("raise ValueError", 1), ("os._exit(6)", 6)],
)
def test_a_program_that_fails_is_known_by_its_code(run, last, code):
    run("import sys; sys.exit()")
    with pytest.raises(runner.FailedRunError, match=f"exit code {code}"):
        run(f"import os, sys; {last}")


def test_a_part_of_the_cases_is_the_same_in_each_process():
    code = (
        "from cases import heads\n"
        "chosen = heads.choose(heads.read_cases(), ['losses'], every=3)\n"
        "print(*(case.id for case, _ in chosen))"
    )
    command = [sys.executable, "-c", code]
    parts = [
        subprocess.run(command, cwd=ROOT, capture_output=True, text=True,
                       env={**os.environ, "PYTHONHASHSEED": seed}).stdout
        for seed in "12"
    ]  # fmt: skip
    assert parts[0] == parts[1] != ""


def test_update_writes_what_is_said_and_leaves_the_rest(tmp_path, monkeypatch, capsys):
    form, other, gone = f"{BATCH_DICE}.right", "losses/two_players.right", "losses/gone.right"
    lines = {key: {"variant": key, "status": "fault"} for key in (other, gone)}
    heads.write_lines(tmp_path / tool.RESULTS, lines)
    monkeypatch.setattr(command, "FOLDER", tmp_path)
    said = {"variant": form, "status": "clean"}
    monkeypatch.setattr(tool, "judge", lambda *_: iter([{**said, "text": ""}]))
    assert command.main([form]) == 9  # Nothing was expected of it.
    assert "1 not as expected" in capsys.readouterr().out
    assert heads.read_lines(tmp_path / tool.RESULTS) == lines
    assert command.main([form, "--update"]) == 0
    assert heads.read_lines(tmp_path / tool.RESULTS) == {other: lines[other], form: said}
    assert command.main([form]) == 0


@pytest.mark.parametrize(
    ("error", "code"),
    [(runner.CannotRunError("full", 8), 8), (runner.CannotRunError("none"), 3),
     (KeyboardInterrupt(), 130)],
)  # fmt: skip
def test_exit_codes_say_what_ended_all(error, code, monkeypatch):
    def judge(*_):
        raise error
        yield

    monkeypatch.setattr(tool, "judge", judge)
    assert command.main([f"{BATCH_DICE}.right"]) == code


def test_the_limit_of_a_run_is_the_one_that_is_given(monkeypatch):
    limits = []

    def judge(case, names, running, folder):
        limits.append(running.timeout_sec)
        return []

    monkeypatch.setattr(tool, "judge", judge)
    assert command.main([f"{BATCH_DICE}.right", "--timeout_sec=7"]) == 0
    assert limits == [7]


def test_shares_are_of_the_wrong_forms():
    case = next(case for case in CASES if len(case.wrong) == 2)
    one, two = (f"{case.id}.{name}" for name in case.wrong)
    fault = {"status": "fault", "node": "nowhere", "step": 0, "name": "no_such"}
    lines = {f"{case.id}.right": {"status": "by design"}, one: fault, two: {"status": "clean"}}
    assert (
        table.score([case], lines, {})[-1] == "| all | 2 | – | – | 1 (50 %) | 0 (0 %) | 0 (0 %) |"
    )


def test_truth_compares_a_wrong_form_with_the_right_one():
    case = next(case for case in CASES if len(case.wrong) == 1 and len(case.right) == 1)
    (wrong,) = (f"{case.id}.{name}" for name in case.wrong)
    for weights, shown in ((5e-5, 0), (5e-4, 1)):
        lines = {
            f"{case.id}.right": {"weights": 1e-5},
            wrong: {"weights": weights, "finite": False},
        }
        assert table.ground_truth([case], lines)[-1] == f"| all | 1 | 1 | 1 | {shown} | 0 | 1 |"


class NoRunner:
    """Runs nothing: each training ends with its number as its weight, or with an error."""

    timeout_sec = 60

    def __init__(self, own_weights=False, error=None, number=1):
        self.given, self._error, self._own, self._number = [], error, own_weights, number

    def trainings_of(self, case, name):
        own = {"own_weights": self._own}
        runs = [{"own_weights": False}, *[own] * self._number]
        return [["python", json.dumps(run)] for run in runs]

    def run(self, training, path, options, variables, limit):
        self.given.append((options, path))
        if self._error:
            raise self._error
        np.savez(path, **{"weights/w": [float(len(self.given))], "losses": [1.0]})


def case_of(name):
    return next(case for case in CASES if case.id == name)


@pytest.mark.parametrize("which", [tool, plain])
@pytest.mark.parametrize(
    "error", [runner.FailedRunError("ended with exit code 1", "tail"), ValueError("why")]
)
def test_a_run_that_failed_is_no_verdict(which, error, tmp_path):
    (line,) = which.judge(case_of(BATCH_DICE), ["right"], NoRunner(error=error), tmp_path)
    assert line["status"] == "refused" and str(error).splitlines()[0] in line["text"]


@pytest.mark.parametrize("which", [tool, plain])
def test_what_cannot_be_run_ends_a_tool(which, tmp_path):
    running = NoRunner(error=runner.CannotRunError("x"))
    with pytest.raises(runner.CannotRunError):
        [*which.judge(case_of(BATCH_DICE), ["right"], running, tmp_path)]


def test_final_weights_are_those_of_the_last_run(tmp_path):
    case = case_of(BATCH_DICE)
    (line,) = plain.judge(case, ["right"], NoRunner(number=2), tmp_path)
    assert line["weights"] == 0.66667  # 1.0 of the reference, 3.0 of the last run.
    port = case._replace(head={**case.head, "mode": "port"})
    (line,) = plain.judge(port, ["right"], NoRunner(), tmp_path)
    assert line["weights"] == 0.5 and line["loss"] is None


def test_tools_say_what_differs():
    was = {"variant": "a.b", "status": "fault", "node": "loss", "step": 0, "name": "x"}
    assert not tool.differs(was, {**was})
    for key in ("status", "node", "step", "name"):
        assert tool.differs(was, {**was, key: "other"}), key
    assert tool.differs(was, {"variant": "a.b", "status": "clean"}) and tool.differs({}, was)
    was = {"weights": 1e-7, "state": None, "loss": 0.0, "finite": True}
    assert not plain.differs(was, {**was, "weights": 9e-5, "loss": 1.0})
    for other in ({"weights": 2e-4}, {"state": 2e-4}, {"finite": False}):
        assert plain.differs(was, {**was, **other}) and plain.differs({**was, **other}, was)


def test_state_is_compared_and_what_is_not_finite_is_told():
    one, other = arrays([1.0], m=[1.0]), arrays([1.0], m=[2.0])
    found = plain.distances([one], [one, other])
    assert found == {"weights": 0.0, "state": 0.5, "loss": 0.0, "finite": True}
    assert not plain.distances([one], [arrays([1.0], m=[np.inf])])["finite"]


@pytest.mark.parametrize("own", [False, True])
def test_a_form_with_weights_of_its_own_replays_nothing(own, tmp_path, monkeypatch):
    def verify_trainings(reference, variants, *_, run):
        for training, replay in ((reference, None), (variants["right"], "first.npz")):
            given = json.dumps({"path": "a.npz", "replay": replay})
            run(training, {trainings.VARIABLE: given}, None, 60, None)

    monkeypatch.setattr(trainings, "verify_trainings", verify_trainings)
    running = NoRunner(own_weights=own)
    running.run = lambda training, path, options, *_: running.given.append(options["replay"])
    [*tool.judge(case_of(BATCH_DICE), ["right"], running, tmp_path)]
    assert running.given == [None, None if own else "first.npz"]


def test_a_line_has_the_place_of_the_verdict_and_its_name(tmp_path, monkeypatch):
    said = Verdict("fault", Place("between", 1), name="state_lost", reason="momentum is 0")
    monkeypatch.setattr(trainings, "verify_trainings", lambda *args, **given: {"right": said})
    (line,) = tool.judge(case_of(BATCH_DICE), ["right"], NoRunner(), tmp_path)
    place = {"node": "between", "step": 1, "name": "state_lost"}
    assert line == {"variant": "losses/batch_dice.right", "status": "fault", **place,
                    "text": "momentum is 0"}  # fmt: skip


def test_first_contacts_are_counted_over_all_rounds():
    *_, last = table.first_contacts()
    assert last == "| all | 286 | 8 | 4 | 1 | 484 (69 %) | 206 | 3 | 10 | 2 | – |"
    rounds = tomllib.loads((heads.FOLDER / "rounds.toml").read_text("utf-8"))["round"]
    known = {case.id: len(case.wrong) for case in CASES}
    programs = [program for each in rounds for program in each["programs"]]
    assert len({*programs}) == len(programs)
    for each in rounds:
        assert len(each["programs"]) == sum(each["right"].values())
        assert sum(known[program] for program in each["programs"]) == sum(each["wrong"].values())
