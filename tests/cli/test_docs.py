"""The pages: their commands are parsed, and one of each kind is run on small data; what they quote.

Commands for workers, frameworks and recordings are run by the tests of these.
"""

import json
import os
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
from app.commands import benchmark
from app.faults import FAULTS
from app.options.table import COMMANDS, options_of
from app.report import plots
from lockstep.answer.html import is_page
from models import MODELS
from tests.conftest import NUM_SMALL, ROOT, copy_program, make_data_small, run_python
from tests.in_process import run_here
from tests.tensorflow_graphs import release_graphs
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
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            parse_command_line(["main.py", *shlex.split(line)])
        refusals.append(None)
    except errors.LockstepError as error:
        refusals.append(str(error))
    except SystemExit:  # --help
        refusals.append(None)
json.dump(refusals, sys.stdout)
"""

# The commands of these pages are run in this order, one of each kind; of RUN_WHOLE, all of them.
PAGES_RUN = ("tour", "pitfalls", "speed", "three_ways", "verify", "exercises")
RUN_WHOLE = ("tour", "exercises")
EXIT_CODES = {"--num_train_examples=1026": 2, "=hierarchical": 6, "=1e30": 7, "--inject": 9}

README = (ROOT / "README.md").read_text(encoding="utf-8")
NOTEBOOK = DOCS / "tour.ipynb"
WRONG_ALL_REDUCE = (DOCS / "wrong_all_reduce.md").read_text("utf-8")

each_page = pytest.mark.parametrize("page", PAGES, ids=lambda path: path.stem)


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
            edit(folder / name, (old, new))


def edit(path, *changes):
    text = path.read_text()
    for old, new in changes:
        assert text.count(old) == 1, (path, old)
        text = text.replace(old, new)
    path.write_text(text)


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
    large = {"num_train": "60_000", "num_test": "10_000"}
    edits = [(f"{n}: int = {large[n]}", f"{n}: int = {NUM_SMALL[n]}") for n in large]
    edit(folder / "app" / "data" / "synthetic.py", *edits)
    return folder


def sh_lines(text):
    return [
        line for block in re.findall(r"```sh\n(.*?)```", text, re.DOTALL)
        for line in block.splitlines()
    ]  # fmt: skip


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


@each_page
def test_links_and_images_lead_somewhere(page):
    text = page.read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^):]+)\)", text):
        name, _, anchor = target.partition("#")
        path = (page.parent / name).resolve() if name else page
        assert path.exists(), target
        if anchor:
            assert anchor in anchors(path.read_text(encoding="utf-8")), target
    assert all(len(words.split()) > 3 for words in re.findall(r"!\[(.*?)\]\(", text))


def anchors(text):
    """Returns what a heading is called in a link, as GitHub does it."""
    headings = re.findall(r"^#+ (.+)$", re.sub(r"```.*?```", "", text, flags=re.DOTALL), re.M)
    kept = (re.sub(r"[^\w\- ]", "", heading.lower()) for heading in headings)
    return {heading.replace(" ", "-") for heading in kept}


def test_commands_are_ones(copy):
    """What is refused at once must be shown with that refusal."""
    lines = [(page, line) for page in PAGES for line in program_lines(page.read_text("utf-8"))]
    result = run_python("-c", PARSER, cwd=copy, input=json.dumps([line for _, line in lines]))
    for (page, line), refusal in zip(lines, json.loads(result.stdout), strict=True):
        if refusal:
            shown = page.read_text("utf-8").partition(line)[2].partition("**")[0]
            assert f"error: {squeeze(refusal)}" == squeeze(shown.partition("```")[2]), line


def commands_to_run():
    """Yields (arguments, expected exit code) of a command of each kind."""
    seen = set()
    for page in PAGES_RUN:
        for line in program_lines((DOCS / f"{page}.md").read_text("utf-8")):
            code = next((code for part, code in EXIT_CODES.items() if part in line), 0)
            words = shlex.split(re.sub(r"=(5000|20000)\b", "=1000", line))
            command = words[0] if words[0] in COMMANDS else "train"
            if "--num_devices=16" in words:  # The process of the tests has four.
                continue
            if command != "compare" and (page in RUN_WHOLE or (command, code) not in seen):
                yield words, command, code
            seen.add((command, code))


@pytest.fixture(scope="module")
def ended(tmp_path_factory):
    """Runs the commands on few images; returns their results, and the expected codes."""
    folder, results = tmp_path_factory.mktemp("page"), []
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        make_data_small(patch)
        patch.setattr(benchmark, "NUM_ROUNDS", 5)
        patch.setattr(benchmark, "BLOCK_SEC", 0.01)
        patch.setitem(MODELS, "lenet", "tests.dense_network:build_dense_network")
        patch.setitem(MODELS, "resnet18", "tests.dense_network:build_conv_norm_network")
        patch.setattr(plots, "render", lambda figure, suffix: b"")  # A quarter of the time.
        for words, command, code in commands_to_run():
            added = ["--dataset=synthetic"] if "dataset" in options_of(command) else []
            if "=1e30" in str(words):
                added.append("--learning_rate=3e38")  # Of one layer, smaller ones stay finite.
            results.append((run_here(*words, *added), code))
            release_graphs()
    return results


@pytest.mark.slow
def test_the_commands_of_the_pages_end_as_they_say(ended):
    assert {code for _, code in ended} == {0, 2, 6, 7, 9}
    for result, code in ended:
        assert result.returncode == code, (result.args, result.stdout, result.stderr)


@each_page
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
RECORDED = f"""
import os, sys
sys.path.append({str(ROOT)!r})
from tests.verifier.test_same_training import record
from tests.verifier.test_resumed import without_momentum
if "--load=c.pt" in sys.argv:
    without_momentum()
else:
    record(**({{"replicas": 2, "reduce": None}} if "WORLD_SIZE" in os.environ else {{}}))
"""


def test_commands_of_the_package_run_as_written(tmp_path):
    one = Script()
    one.write(tmp_path / "one.npz")
    Script(replay=one, permute=1).write(tmp_path / "permuted.npz")
    Script(replicas=2, replay=one, reduce=None).write(tmp_path / "two.npz")
    (tmp_path / "train.py").write_text(RECORDED, encoding="utf-8")
    torchrun = tmp_path / "bin" / "torchrun"
    torchrun.parent.mkdir()
    torchrun.write_text('#!/bin/sh\nshift\nWORLD_SIZE=2 exec python "$@"\n', encoding="utf-8")
    torchrun.chmod(0o755)
    path = os.pathsep.join([str(torchrun.parent), os.environ["PATH"]])
    lines = {line: page for page in PAGES for line in sh_lines(page.read_text("utf-8"))}
    # That of the README is run by tests/verifier/test_frameworks.py.
    lines = [n for n in lines if n.startswith("python -m lockstep ") and "examples/" not in n]
    assert len(lines) >= 3 and any("lockstep run " in line for line in lines)
    for line in lines:
        done = subprocess.run(
            line.replace("python", sys.executable, 1), shell=True, cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(ROOT), "PATH": path},
            capture_output=True, text=True,
        )  # fmt: skip
        assert done.returncode == (0 if " show " in line else 9), (line, done.stderr)
    (path,) = {line.partition(" > ")[2] for line in lines if " > " in line}
    assert json.loads((tmp_path / path).read_text())["status"] == "fault"


def test_the_action_ends_as_the_verdict_and_writes_it_to_the_summary(tmp_path):
    action = yaml.safe_load((ROOT / "action.yml").read_text("utf-8"))
    step = action["runs"]["steps"][-1]
    (tmp_path / "train.py").write_text(RECORDED, encoding="utf-8")
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python").symlink_to(sys.executable)
    train = f"{sys.executable} train.py"
    given = {"reference": train, "options": "--steps 1", "html": "page.html"}
    for variant, code in ((f"env WORLD_SIZE=2 {train}", 9), (f"{sys.executable} missing.py", 2)):
        given["variant"] = variant
        environment = {
            name: given[re.fullmatch(r"\${{ inputs\.(\w+) }}", text)[1]]
            for name, text in step["env"].items()
        }
        summary = tmp_path / f"{code}.md"
        done = subprocess.run(
            ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", step["run"]], cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(ROOT), "GITHUB_STEP_SUMMARY": str(summary),
                 "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}", **environment},
            capture_output=True, text=True,
        )  # fmt: skip
        assert done.returncode == code, done.stderr
        assert is_page(tmp_path / "page.html") == (code == 9)
    text = (tmp_path / "9.md").read_text("utf-8")
    sentence = "variant is not the reference training: not all-reduced in step 0 (sum)"
    assert text.startswith(f"### {sentence}\n\n```text\n")
    assert text.endswith("\n```\n")


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


def test_every_fault_has_its_pitfall():
    commands = "\n".join(sh_lines((DOCS / "pitfalls.md").read_text(encoding="utf-8")))
    for fault in FAULTS:
        assert re.search(rf"--inject={fault}\b", commands), fault


def test_make_train_passes_options_on():
    (line,) = [line for line in sh_lines(README) if line.startswith("make train ARGS=")]
    words = [*shlex.split(line), "--dry-run", "--no-print-directory"]  # Within `make test`, too.
    done = subprocess.run(words, capture_output=True, text=True, cwd=ROOT, check=True)
    options = shlex.split(line)[-1].removeprefix("ARGS=")
    assert done.stdout.splitlines()[-1] == f".venv/bin/python main.py {options}"


def test_figures_are_of_this_version_and_of_the_command_beside_them():
    (line,) = [line for line in program_lines(README) if line.endswith(" --steps=5")]
    recording = (DOCS / "recording.svg").read_text(encoding="utf-8")
    assert "mirrored is the training on one device" in recording and line in recording
    figure = (DOCS / "same_curve.svg").read_text("utf-8")  # With texts as comments.
    assert "is the training on one device" in figure and "first in step 2, " in figure


def texts_of(notebook):
    """Returns what each cell of code has printed and returned."""

    def text_of(output):
        return output.get("text", "") or "\n" + output.get("data", {}).get("text/plain", "")

    cells = (cell for cell in notebook.cells if cell.cell_type == "code")
    return ["".join(map(text_of, cell.outputs)) for cell in cells]


@pytest.mark.slow
def test_the_notebook_runs_and_shows_what_it_says():
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    shown = texts_of(notebook)
    # Under pytest a kernel leaves out what processes of its own print.
    environment = {k: v for k, v in os.environ.items() if k != "PYTEST_CURRENT_TEST"}
    nbclient.NotebookClient(
        notebook, timeout=300, resources={"metadata": {"path": NOTEBOOK.parent}}
    ).execute(env=environment)  # Raises where a cell fails.
    seen = texts_of(notebook)
    fault = "\nmanual is not the training on one device: part of the batch lost in step 1 (sum)\n"
    end = "\nexit code 9: mismatch in manual; see runs/notebook/fault/report.html\n"
    for told in ("[[3. 3.]]", "'mirrored': 'clean'", fault, end, "\nTrue", "(8, True)"):
        for texts in (shown, seen):
            assert any(told in text for text in texts), told
    by_hand, mirrored = next(text for text in seen if text.startswith("manual 0.")).splitlines()
    assert by_hand.split()[1:] == mirrored.split()[1:]
    assert not any(word in text for text in shown for word in ("WARNING: All log", "Traceback"))
