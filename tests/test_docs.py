"""The pages: what they tell a reader to do, done in a copy of the program; what they quote."""

import json
import re
import shlex
import shutil
import subprocess
import sys
import xml.etree.ElementTree as ElementTree

import pytest

from app.config.fault import FAULTS
from conftest import ROOT, copy_program, program_environment

DOCS = ROOT / "docs"
OF_ROOT = ("README", "BUILD", "CHANGELOG", "CONTRIBUTING", "SECURITY")
PAGES = [*sorted(DOCS.glob("*.md")), *(ROOT / f"{n}.md" for n in OF_ROOT)]
GUIDES = ("add_a_model", "add_a_strategy", "add_an_option")
TEXTS = {name: (DOCS / f"{name}.md").read_text(encoding="utf-8") for name in GUIDES}
OWN_CASE = (DOCS / "verify_your_own.md").read_text(encoding="utf-8")
AVERAGES = "## If it averages instead"
ODD_ONE = " + ([partial[-1]] if len(partial) % 2 else [])"
PROGRAM = r"^(?:\w+=\S+ |taskset -c 0 )*(?:\.venv/bin/)?python main\.py ?(.*)$"
# Parses each command line of a JSON list; prints a refusal, or null, for each.
PARSER = """
import contextlib, io, json, shlex, sys
from absl import logging  # It defines --verbosity.
from app.runtime import errors
from app.cli import flags
flags.define_flags()
refusals = []
for line in json.load(sys.stdin):
    flags.FLAGS.unparse_flags()
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            flags.parse_config(["main.py", *shlex.split(line)])
        refusals.append(None)
    except errors.LockstepError as error:
        refusals.append(str(error))
    except SystemExit:  # --help
        refusals.append(None)
json.dump(refusals, sys.stdout)
"""

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
    shutil.copy(ROOT / "pyproject.toml", folder)
    shutil.copytree(ROOT / "tests", folder / "tests", ignore=shutil.ignore_patterns("__pycache__"))
    for text in (*TEXTS.values(), OWN_CASE):
        follow(folder, text.partition(AVERAGES)[0])
    return folder


def command(page, mark):
    """Returns the one command of a page that holds `mark`."""
    (found,) = [line for line in sh_lines(TEXTS[page]) if mark in line]
    return found


def sh_lines(text):
    return [
        line for block in re.findall(r"```sh\n(.*?)```", text, re.DOTALL)
        for line in block.splitlines()
    ]  # fmt: skip


def run(copy, line, small_data):
    arguments = shlex.split(line)[1:]
    if arguments[0] == "main.py":
        arguments.append("--allow_unverified_data")
    return subprocess.run(
        [sys.executable, *arguments],
        capture_output=True, text=True, cwd=copy, timeout=300, check=False,
        env=program_environment(FASHION_MNIST_DIR=str(small_data), COLUMNS="200"),
    )  # fmt: skip


def run_ok(copy, line, small_data):
    result = run(copy, line, small_data)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def assert_quoted(text, output):
    """Asserts that each indented block of `text` is in `output`, but for its gaps and breaks."""
    for quote in re.findall(r"(?:^ {4}.*\n)+", re.sub(r"```.*?```", "", text, flags=re.S), re.M):
        for part in squeeze(quote).split("…"):
            assert part.strip() in squeeze(output)


def squeeze(text):
    return " ".join(text.split())


@pytest.mark.slow
def test_one_s_own_model_is_verified_and_trained(copy, small_data):
    output = run_ok(copy, command("add_a_model", "verify"), small_data)
    _, verified, _ = re.split("## 4|## 5", TEXTS["add_a_model"])
    assert_quoted(verified, output)
    output = run_ok(copy, command("add_a_model", "--out=runs/mlp"), small_data)
    peak = re.search(r'"mlp": dataclasses.*peak_learning_rate=([\d.]+)', TEXTS["add_a_model"])[1]
    # 4 steps, of the 200 from which on the peak is the recipe's.
    assert f"recipe fast, batch 256, learning rate {float(peak) * 4 / 200:g}" in output


@pytest.mark.e2e
def test_one_s_own_model_is_refused_with_dropout(copy, small_data):
    kept = (copy / "models" / "mlp.py").read_text()
    dropout = "    x = layers.Dropout(0.5)(x)\n"
    comment = "    # In the weights' own precision"
    edit(copy / "models" / "mlp.py", (comment, dropout + comment))
    result = run(copy, "python main.py verify --model=mlp --strategies=manual", small_data)
    (copy / "models" / "mlp.py").write_text(kept)
    assert result.returncode == 2
    assert_quoted(TEXTS["add_a_model"].partition("## Dropout")[2], result.stderr)


@pytest.mark.slow
def test_one_s_own_all_reduce_is_verified_and_its_fault_found(copy, small_data):
    line = command("add_a_strategy", "main.py verify --strategies=manual --all_reduce=pairwise")
    run_ok(copy, line, small_data)
    kept = (copy / "strategies" / "collectives.py").read_text()
    assert ODD_ONE in TEXTS["add_a_strategy"].partition("Leave out the term")[2]
    edit(copy / "strategies" / "collectives.py", (ODD_ONE, ""))
    result = run(copy, line, small_data)
    (copy / "strategies" / "collectives.py").write_text(kept)
    assert result.returncode == 6
    assert_quoted(TEXTS["add_a_strategy"].partition("## The contract")[0], result.stderr)


@pytest.mark.slow
def test_one_s_own_strategy_is_verified_and_trained(copy, small_data):
    output = run_ok(copy, command("add_a_strategy", "=manual,server"), small_data)
    assert "manual and server: bit-identical" in output
    assert "`manual and server: bit-identical`" in TEXTS["add_a_strategy"]
    run_ok(copy, command("add_a_strategy", "--strategy=server"), small_data)


@pytest.mark.slow
def test_one_s_own_parts_pass_the_tests_of_all(copy, small_data):
    """The page's lines of pytest in one process; the parity test of four steps is the longest."""
    lines = [line for page in GUIDES for line in sh_lines(TEXTS[page]) if "pytest" in line]
    files = [word for line in lines for word in shlex.split(line) if word.startswith("tests/")]
    marks = [shlex.split(line)[-1] for line in lines if " -k " in line]
    chosen = " or ".join(["mlp", "every_field_is_an_option", *marks])
    files += ["tests/test_config.py"]
    output = run_ok(copy, f"python -m pytest -n0 -rA {' '.join(files)} -k '{chosen}'", small_data)
    for passed in (
        "test_shapes_and_parameters[mlp]",
        "test_all_reduce_gives_every_replica_the_exact_sum[pairwise-3]",
        "test_gradient_against_a_hand_computed_case[server]",
        "test_parity_step_by_step[3-15]",
        "test_every_field_is_an_option_with_a_help_text_and_a_group[train]",
    ):
        assert re.search(rf"^PASSED .*::{re.escape(passed)}$", output, re.M), passed


@pytest.mark.slow
def test_one_s_own_strategy_is_found_out_if_it_averages(copy, small_data):
    path = copy / "strategies" / "server.py"
    text, kept = TEXTS["add_a_strategy"].partition(AVERAGES)[2], path.read_text()
    in_all_reduce, in_step = text.split("Where the all-reduce is right")
    line = command("add_a_strategy", "--steps=1")
    for told, code in ((in_all_reduce, 6), (in_step, 9)):
        follow(copy, told)
        result = run(copy, line, small_data)
        path.write_text(kept)
        assert result.returncode == code
        # The first mismatch, and its size, depend on the images.
        told = re.sub(r"sums of .*\)\n", "…\n", told)
        assert_quoted(told, result.stdout + result.stderr)


def test_one_s_own_option_is_in_the_help_and_checked(copy, small_data):
    text = TEXTS["add_an_option"]
    in_help, in_checks = re.split(r"(?=```sh\npython main.py --precision)", text)
    assert_quoted(in_help, run_ok(copy, command("add_an_option", "--help"), small_data))
    assert "--loss_scale" not in run_ok(copy, "python main.py benchmark --help", small_data)
    lines = [line for line in sh_lines(text) if "--loss_scale=" in line]
    results = [run(copy, line, small_data) for line in lines]
    assert [result.returncode for result in results] == [2, 2]
    assert_quoted(in_checks, "".join(result.stderr for result in results))


@pytest.mark.e2e
@pytest.mark.slow
def test_ones_own_case_is_verified_as_the_page_shows(tmp_path):
    """Follows docs/verify_your_own.md; numbers of the output may differ by rounding."""
    case, remedy, script = re.findall(r"```python\n(.*?)```", OWN_CASE, re.DOTALL)
    (tmp_path / "my_case.py").write_text(case + remedy)
    (tmp_path / "script.py").write_text(script)
    shutil.copy(ROOT / "recorders" / "lockstep_keras.py", tmp_path)
    shutil.copytree(ROOT / "recorders" / "keras_comparison", tmp_path / "keras_comparison")
    shown = re.findall(r"```text\n(.*?)```", OWN_CASE, re.DOTALL)
    verifications = [line for line in sh_lines(OWN_CASE) if " verify " in line]
    first, second = (shlex.split(line)[2:] for line in verifications)
    commands = ([ROOT / "main.py", *first], [ROOT / "main.py", *second], ["script.py"])
    for command, expected, code in zip(commands, shown, (9, 0, 0), strict=True):
        result = subprocess.run(
            [sys.executable, *command], capture_output=True, text=True, cwd=tmp_path, timeout=300,
            env=program_environment(COLUMNS="200"), check=False,
        )  # fmt: skip
        assert result.returncode == code, result.stdout + result.stderr
        lines = result.stdout.splitlines()
        start = next(i for i, line in enumerate(lines) if squeeze(line).startswith(expected[:20]))
        lines, wanted = lines[start:], [line for line in expected.splitlines() if line]
        lines = [line for line in lines if line][: len(wanted)]
        number = re.compile(r"\d+\.\d+")
        assert [number.sub("#", line) for line in lines] == [number.sub("#", x) for x in wanted]
        numbers, others = (list(map(float, number.findall(" ".join(x)))) for x in (lines, wanted))
        assert numbers == pytest.approx(others, rel=0.02)
    assert (tmp_path / "trace.npz").exists() and (tmp_path / "runs/my_case/report.html").exists()


@each_page
def test_links_lead_somewhere(page):
    text = page.read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^):]+)\)", text):
        name, _, anchor = target.partition("#")
        path = (page.parent / name).resolve() if name else page
        assert path.exists(), target
        if anchor:
            assert anchor in anchors(path.read_text(encoding="utf-8")), target


def anchors(text):
    """Returns what a heading is called in a link, as GitHub does it."""
    headings = re.findall(r"^#+ (.+)$", re.sub(r"```.*?```", "", text, flags=re.DOTALL), re.M)
    kept = (re.sub(r"[^\w\- ]", "", heading.lower()) for heading in headings)
    return {heading.replace(" ", "-") for heading in kept}


@each_page
def test_images_are_there_and_told_in_words(page):
    for words, name in re.findall(r"!\[(.*?)\]\((\S+?)\)", page.read_text(encoding="utf-8")):
        path = page.parent / name
        assert path.is_file() and len(words.split()) > 3, name
        if path.suffix == ".svg":
            root = ElementTree.parse(path).getroot()
            space = {"svg": "http://www.w3.org/2000/svg"}
            assert root.get("role") == "img"
            assert root.find("svg:title", space).text and root.find("svg:desc", space).text
            assert "prefers-color-scheme: dark" in root.find("svg:style", space).text


@each_page
def test_commands_are_ones(page, copy):
    """What is refused at once must be shown with that refusal."""
    text = page.read_text(encoding="utf-8")
    lines = [found[1] for line in sh_lines(text) if (found := re.match(PROGRAM, line))]
    result = subprocess.run(
        [sys.executable, "-c", PARSER], input=json.dumps(lines),
        capture_output=True, text=True, cwd=copy, check=True,
    )  # fmt: skip
    refusals = json.loads(result.stdout)
    for line, refusal in zip(lines, refusals, strict=True):
        if refusal:
            shown = text.partition(line)[2].partition("**")[0]
            assert f"error: {squeeze(refusal)}" == squeeze(shown.partition("```")[2]), line


@each_page
def test_quoted_code_is_in_its_file(page):
    """Gaps are marked by `…`; files that the program does not have are the reader's own."""
    for name, code in blocks(page.read_text(encoding="utf-8"), "python"):
        if not (ROOT / name).exists():
            assert page.stem in (*GUIDES, "verify_your_own")
            continue
        source, at = squeeze((ROOT / name).read_text(encoding="utf-8")), 0
        for part in code.split("…"):
            at = source.find(squeeze(part), at)
            assert at >= 0, (name, part)
            at += len(squeeze(part))


def test_every_fault_has_its_pitfall():
    commands = "\n".join(sh_lines((DOCS / "pitfalls.md").read_text(encoding="utf-8")))
    for fault in FAULTS:
        assert re.search(rf"--inject={fault}\b", commands), fault


def test_every_pitfall_is_in_the_index():
    text = (DOCS / "pitfalls.md").read_text(encoding="utf-8")
    numbers = [int(number) for number in re.findall(r"^## (\d+)\.", text, re.M)]
    assert numbers == list(range(1, len(numbers) + 1))
    assert re.findall(r"^\| (\d+) \| \[", text, re.M) == [str(number) for number in numbers]
    entries = re.split(r"^## ", text, flags=re.M)[1:]
    assert all("**Cause.**" in entry and "**Fix.**" in entry for entry in entries)
