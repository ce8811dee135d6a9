"""The README's own commands, run as they are written."""

import re
import shlex
import subprocess
import sys

import pytest

from conftest import ROOT, copy_program

README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```sh\n(.*?)```", README, re.DOTALL)
COMMANDS = [line for block in BLOCKS for line in block.splitlines()]
MAKE = [line for line in COMMANDS if line.startswith("make ")]
PROGRAM = [line for line in COMMANDS if line.startswith(".venv/bin/python main.py")]


@pytest.fixture(scope="module")
def copy(tmp_path_factory):
    """The program as it is cloned."""
    folder = tmp_path_factory.mktemp("clone")
    copy_program(folder)
    return folder


def test_all_commands_are_of_these_two_kinds():
    assert sorted(MAKE + PROGRAM) == sorted(COMMANDS)
    assert {"make train", "make test", "make test-all", "make lint"} <= set(MAKE)


@pytest.mark.parametrize("line", MAKE)
def test_make_targets_lead_to_the_program(line):
    """A dry run: installing takes a minute, and `make test` would run itself."""
    result = subprocess.run(
        [*shlex.split(line), "--dry-run"], capture_output=True, text=True, cwd=ROOT, check=True
    )
    starts = {
        "train": ".venv/bin/python main.py",
        "test": '.venv/bin/python -m pytest -m "not slow"',
        "test-all": ".venv/bin/python -m pytest",
    }
    expected = starts.get(line.split()[1], ".venv/bin/ruff check .")
    last = [command for command in result.stdout.splitlines() if command.startswith(expected)]
    assert len(last) == 1
    if "ARGS" in line:
        assert last[0].endswith(shlex.split(line)[2].removeprefix("ARGS="))


@pytest.mark.slow
def test_the_program_s_commands_run_one_after_another(copy):
    for line in PROGRAM:
        result = subprocess.run(
            [sys.executable, *shlex.split(line)[1:]],
            capture_output=True, text=True, cwd=copy, timeout=300, check=False,
        )  # fmt: skip
        assert result.returncode == 0, line + result.stdout + result.stderr
        if " --steps=5 " in line:
            assert "manual and mirrored: bit-identical" in result.stdout
        if " report " in line:
            assert (copy / "runs" / "start" / "report.html").exists()
        if " evaluate " in line:
            log = (copy / "runs" / "start" / "log.txt").read_text()
            assert result.stdout.split("test acc: ")[1][:6] in log


def test_files_that_it_points_to_are_there():
    for target in re.findall(r"\]\(([^)#:]+)\)", README):
        assert (ROOT / target).exists(), target
