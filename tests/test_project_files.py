"""The files for contributors: one version, and the same checks in hooks, workflow and make."""

import ast
import re

import pytest
import yaml

from conftest import ROOT


def load_yaml(name):
    return yaml.safe_load((ROOT / name).read_text(encoding="utf-8"))


def test_hooks_run_the_tools_of_make_lint_from_the_environment():
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    recipe = re.search(r"^lint:.*\n((?:\t.*\n)+)", makefile, re.MULTILINE)[1]
    (repository,) = load_yaml(".pre-commit-config.yaml")["repos"]
    assert repository["repo"] == "local"
    assert {hook["language"] for hook in repository["hooks"]} == {"system"}
    entries = [hook["entry"].replace(".venv/bin/", "$(BIN)/") for hook in repository["hooks"]]
    assert [*map(tool, entries)] == [*map(tool, recipe.splitlines())]


def tool(command):
    """Returns the program and its subcommand, without options and paths."""
    return [word for word in command.split() if not word.startswith("-") and word != "."]


def test_the_lock_file_has_every_pinned_package_and_a_hash_for_each():
    text = (ROOT / "requirements.lock").read_text(encoding="utf-8")
    entries = re.findall(
        r"^([\w.-]+==\S+)(?: ;[^\n\\]*)? \\\n((?:    --hash=\S+.*\n)+)", text, re.M
    )
    locked = {name.lower().replace("_", "-") for name, hashes in entries if "sha256:" in hashes}
    pinned = (ROOT / "requirements.txt").read_text(encoding="utf-8").split()
    assert {name.lower().replace("_", "-") for name in pinned} <= locked
    assert len(entries) == len(re.findall(r"^[\w.-]+==", text, re.M)) > 50


def test_the_workflow_runs_ci_on_every_supported_python():
    job = load_yaml(".github/workflows/test.yml")["jobs"]["test"]
    assert job["strategy"]["matrix"]["python-version"] == ["3.11", "3.12", "3.13"]
    assert [step["run"] for step in job["steps"] if "run" in step] == [".ci/run"]
    (setup,) = [step["with"] for step in job["steps"] if "setup-python" in step.get("uses", "")]
    assert setup["python-version"] == "${{ matrix.python-version }}" and setup["cache"] == "pip"


@pytest.mark.parametrize("name", ["BUILD", "CONTRIBUTING"])
def test_make_targets_of_the_page_exist(name):
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z-]+):", makefile, re.MULTILINE))
    text = (ROOT / f"{name}.md").read_text(encoding="utf-8")
    assert set(re.findall(r"`make ([a-z-]+)", text)) <= targets


def test_frameworks_and_recorders_use_nothing_of_the_program():
    """They run where it is not installed."""
    paths = [p for folder in ("frameworks", "recorders") for p in (ROOT / folder).rglob("*.py")]
    assert len(paths) > 3
    for path in paths:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            modules = [node.module] if isinstance(node, ast.ImportFrom) else []
            if isinstance(node, ast.Import):
                modules = [alias.name for alias in node.names]
            packages = {(name or "").split(".")[0] for name in modules}
            assert packages.isdisjoint({"app", "models", "recorders", "strategies"}), path
