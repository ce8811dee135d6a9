"""The pages: the commands that they show, and what they quote; `make site` checks links."""

import json
import os
import pathlib
import re
import shlex
import shutil
import subprocess
import sys
from unittest import mock

import nbclient
import nbformat
import pytest
import yaml

import lockstep
from lockstep.answer.html import is_page
from tests.conftest import ROOT, copy_program, run_python
from tests.verifier.trainer import Script

DOCS = ROOT / "docs"
OF_ROOT = ("README", "BUILD", "CHANGELOG", "CONTRIBUTING", "SECURITY")
SKILL = ROOT / "examples" / "skill" / "SKILL.md"
PAGES = [*sorted(DOCS.glob("*.md")), *(ROOT / f"{n}.md" for n in OF_ROOT), SKILL]
EXTEND = (DOCS / "extend.md").read_text(encoding="utf-8")
PROGRAM = r"^(?:\w+=\S+ |taskset -c 0 )*(?:\.venv/bin/)?python main\.py ?(.*)$"
# Parses each command line of a JSON list; prints a refusal, or null, for each.
PARSER = """
import contextlib, io, json, shlex, sys
from app import errors
from app.options import parse_command_line
refusals = []
for line in json.load(sys.stdin):
    refusals.append(None)
    try:  # --help ends in SystemExit.
        with contextlib.suppress(SystemExit), contextlib.redirect_stdout(io.StringIO()):
            parse_command_line(["main.py", *shlex.split(line)])
    except errors.LockstepError as error:
        refusals[-1] = str(error)
json.dump(refusals, sys.stdout)
"""

WRONG_ALL_REDUCE = (DOCS / "wrong_all_reduce.md").read_text("utf-8")


def blocks(text, language):
    """Returns (file, code) of each block whose first line names a file, in order."""
    found = re.findall(rf"```{language}\n# (\S+)\n(.*?)```", text, re.DOTALL)
    assert len(found) == text.count(f"```{language}\n# ")
    return found


def follow(folder, text):
    """Does what a page says: writes its new files, makes its changes to others."""
    for name, code in blocks(text, "python"):
        (folder / name).write_text(code)
    for name, changes in blocks(text, "diff"):
        for hunk in changes.split("…\n"):
            lines = [line if line.strip() else " " for line in hunk.splitlines()]
            assert {line[0] for line in lines} <= {" ", "+", "-"}
            old, new = ("".join(x[1:] + "\n" for x in lines if x[0] in k) for k in (" -", " +"))
            source = (folder / name).read_text()
            assert source.count(old) == 1, (name, old)
            (folder / name).write_text(source.replace(old, new))


@pytest.fixture(scope="module")
def copy(tmp_path_factory):
    """The program with the reader's own model, all-reduce, strategy and option in it."""
    folder = tmp_path_factory.mktemp("copy")
    copy_program(folder)
    shutil.copy(ROOT / "examples" / "extend" / "mlp.py", folder / "models")
    for name in ("server", "rebound"):
        shutil.copy(ROOT / "examples" / "extend" / f"{name}.py", folder / "strategies")
    for text in (EXTEND, WRONG_ALL_REDUCE):
        follow(folder, text)
    return folder


def sh_lines(text):
    return "".join(re.findall(r"```sh\n(.*?)```", text, re.DOTALL)).splitlines()


def program_lines(text):
    """Returns the arguments of each command line of the program, in order."""
    return [found[1] for line in sh_lines(text) if (found := re.match(PROGRAM, line))]


def run(copy, line):
    """Runs a command of a page in the reader's copy, on generated images."""
    words = [*shlex.split(line), "--dataset=synthetic"]
    return run_python("main.py", *words, cwd=copy, env={"COLUMNS": "200"})


def squeeze(text):
    return " ".join(text.split())


@pytest.mark.slow
def test_ones_own_model_all_reduce_and_strategy_are_verified(copy):
    for line in program_lines(EXTEND):
        if not line.startswith("verify "):  # It is trained there, too.
            continue
        result = run(copy, line)
        assert result.returncode == 0, line + result.stdout + result.stderr
        if "manual," in line:
            assert "manual and " in result.stdout and ": bit-identical" in result.stdout


@pytest.mark.slow
def test_the_wrong_all_reduce_is_found(copy):
    verify, train = program_lines(WRONG_ALL_REDUCE)
    (shown,) = re.findall(r"```text\n(.*?)```", WRONG_ALL_REDUCE, re.DOTALL)
    result = run(copy, verify)
    assert result.returncode == 9
    for line in shown.splitlines():
        assert " where " in line or squeeze(line) in squeeze(result.stdout)
    result = run(copy, train.replace("=5000", "=1000"))
    assert result.returncode == 9
    (quote,) = re.findall(r"(?:^ {4}\w.*\n)+", WRONG_ALL_REDUCE.partition(train)[2], re.M)
    assert all(squeeze(each) in squeeze(result.stderr) for each in quote.split("…"))


def test_commands_are_ones(copy):
    """What is refused at once must be shown with that refusal."""
    lines = [(page, line) for page in PAGES for line in program_lines(page.read_text("utf-8"))]
    result = run_python("-c", PARSER, cwd=copy, input=json.dumps([line for _, line in lines]))
    for (page, line), refusal in zip(lines, json.loads(result.stdout), strict=True):
        if refusal:
            shown = page.read_text("utf-8").partition(line)[2].partition("**")[0]
            assert f"error: {squeeze(refusal)}" == squeeze(shown.partition("```")[2]), line


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.stem)
def test_quoted_code_is_in_its_file(page):
    """Gaps are marked by `…`; files that the program does not have are the reader's own."""
    for name, code in blocks(page.read_text(encoding="utf-8"), "python"):
        if not (ROOT / name).exists():
            continue
        source, at = squeeze((ROOT / name).read_text(encoding="utf-8")), 0
        for part in code.split("…"):
            at = source.find(squeeze(part), at)
            assert at >= 0, (name, part)
            at += len(squeeze(part))


# A training with NumPy that records itself; in two processes, it has no all-reduce, and where it
# resumes, no momentum.
RECORDED = """
import os, sys
from tests.verifier import test_same_training
if "--load=c.pt" in sys.argv:
    from tests.verifier.test_resumed import without_momentum
    without_momentum()
else:
    wrong = {"replicas": 2, "reduce": None}
    test_same_training.record(**(wrong if "WORLD_SIZE" in os.environ else {}))
"""
TORCHRUN = '#!/bin/sh\nshift\nWORLD_SIZE=2 exec python "$@"\n'


@pytest.fixture
def run_in_folder(tmp_path):
    """Runs a line of a shell in a folder with that script and `torchrun`."""
    (tmp_path / "train.py").write_text(RECORDED, encoding="utf-8")
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "torchrun").write_text(TORCHRUN, encoding="utf-8")
    (tmp_path / "bin" / "torchrun").chmod(0o755)
    folders = tmp_path / "bin", pathlib.Path(sys.executable).parent  # Of this Python.

    def run_line(line, **environment):
        path = ":".join([*map(str, folders), os.environ["PATH"]])
        return subprocess.run(
            ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", line], cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(ROOT), "PATH": path, **environment},
            capture_output=True, text=True,
        )  # fmt: skip

    return run_line


def test_commands_of_the_package_run_as_written(tmp_path, run_in_folder):
    one = Script()
    one.write(tmp_path / "one.npz")
    Script(replay=one, permute=1).write(tmp_path / "permuted.npz")
    Script(replicas=2, replay=one, reduce=None).write(tmp_path / "two.npz")
    lines = {line for page in PAGES for line in sh_lines(page.read_text("utf-8"))}
    # That of the README is run by tests/verifier/test_frameworks.py.
    lines = [n for n in sorted(lines) if re.match("python -m lockstep (?!.*examples/)", n)]
    assert len(lines) >= 3 and any("lockstep run " in line for line in lines)
    for line in lines:
        done = run_in_folder(line)
        assert done.returncode == (0 if " show " in line else 9), (line, done.stderr)
    (path,) = {line.partition(" > ")[2] for line in lines if " > " in line}
    assert json.loads((tmp_path / path).read_text())["status"] == "fault"


@pytest.mark.slow
def test_the_action_ends_as_the_verdict_and_writes_it_to_the_summary(tmp_path, run_in_folder):
    action = yaml.safe_load((ROOT / "action.yml").read_text("utf-8"))
    step = action["runs"]["steps"][-1]
    given = {"reference": "python train.py", "options": "--steps 1", "html": "page.html"}
    for variant, code in (("env WORLD_SIZE=2 python train.py", 9), ("python missing.py", 2)):
        given["variant"] = variant
        environment = {
            name: given[re.fullmatch(r"\${{ inputs\.(\w+) }}", text)[1]]
            for name, text in step["env"].items()
        }
        summary = tmp_path / f"{code}.md"
        done = run_in_folder(step["run"], GITHUB_STEP_SUMMARY=str(summary), **environment)
        assert done.returncode == code, done.stderr
        assert is_page(tmp_path / "page.html") == (code == 9)
    sentence = "variant is not the reference training: not all-reduced in step 0 (sum)"
    assert (tmp_path / "9.md").read_text("utf-8").startswith(f"### {sentence}\n\n```text\n")


def test_the_skill_has_names_that_exist(monkeypatch):
    body = SKILL.read_text(encoding="utf-8").split("---\n")[2]
    schema = json.loads((ROOT / "lockstep" / "verify.schema.json").read_text(encoding="utf-8"))
    parts = [schema, *schema["$defs"].values()]
    keys = {key for part in parts for key in part.get("properties", ())}
    reading = body.partition("## Read the JSON\n")[2].partition("\n## ")[0]
    assert {*re.findall(r"`(\w+)`", reading)} <= keys
    (code,) = re.findall(r"```python\n(.*?)```", body, re.DOTALL)
    called, space = mock.create_autospec(lockstep.assert_same_training), {}
    monkeypatch.setattr(lockstep, "assert_same_training", called)
    exec(code, space)
    space["test_two_processes_train_like_one"]()
    (job,) = yaml.safe_load((ROOT / "examples" / "ci.yml").read_text("utf-8"))["jobs"].values()
    assert job["steps"][-1]["with"]["path"] == called.call_args.kwargs["json_path"]


def text_of(notebook):
    """Returns what the cells have printed and returned."""
    outputs = [each for cell in notebook.cells for each in cell.get("outputs", ())]
    return "".join(
        each.get("text", "") or "\n" + each.get("data", {}).get("text/plain", "")
        for each in outputs
    )


@pytest.mark.slow
def test_the_notebook_runs_and_shows_what_it_says():
    notebook = nbformat.read(DOCS / "tour.ipynb", as_version=4)
    shown = text_of(notebook)
    # Under pytest a kernel leaves out what processes of its own print.
    environment = {k: v for k, v in os.environ.items() if k != "PYTEST_CURRENT_TEST"}
    resources = {"metadata": {"path": DOCS}}
    nbclient.NotebookClient(notebook, timeout=300, resources=resources).execute(env=environment)
    fault = "\nmanual is not the training on one device: part of the batch lost in step 1 (sum)\n"
    end = "\nexit code 9: mismatch in manual; see runs/notebook/fault/report.html\n"
    for told in ("[[3. 3.]]", "'mirrored': 'clean'", fault, end, "\nTrue", "(8, True)"):
        assert told in shown and told in text_of(notebook), told
    manual, mirrored = re.findall(r"^(?:manual|mirrored) (0\..*)$", text_of(notebook), re.MULTILINE)
    assert manual.split() == mirrored.split()
    assert "WARNING: All log" not in shown and "Traceback" not in shown
