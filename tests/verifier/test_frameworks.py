"""Commands of pages that verify trainings in PyTorch and JAX: of `frameworks/` and the README."""

import json
import os
import pathlib
import re
import shlex
import subprocess
import sys

import pytest

from tests.conftest import ROOT, write_images
from tests.verifier.recorder_scripts import interpreter, needs

pytestmark = [needs("torch", "jax"), pytest.mark.slow]
PAGE = ROOT / "docs" / "frameworks.md"


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    """The environment of the programs, with a folder of small data."""
    folder = tmp_path_factory.mktemp("data")
    write_images(folder, 800, 200)
    return {**os.environ, "FASHION_MNIST_DIR": str(folder), "JAX_PLATFORMS": "cpu"}


def command_of_page():
    """Returns the words of the page's command, with the interpreters that the tests use."""
    text = PAGE.read_text("utf-8").replace("\\\n", " ")
    line = next(line for line in text.splitlines() if "-m lockstep run" in line)
    folders = {package: pathlib.Path(interpreter(package)).parent for package in ("torch", "jax")}
    words = []
    for word in shlex.split(line):
        package = "jax" if "jax_lenet" in word else "torch"
        word = word.replace(".venv-bench/bin", str(folders[package]), 1)
        words.append(re.sub(r"(^|=)\.venv/bin/python", rf"\g<1>{sys.executable}", word))
    return words


def run(words, environment):
    return subprocess.run(
        words, cwd=ROOT, env=environment, check=False, capture_output=True, text=True, timeout=500
    )


def test_the_command_of_the_page_finds_one_training(environment):
    result = run([*command_of_page(), "--json"], environment)
    assert result.returncode == 0, result.stderr
    found = json.loads(result.stdout)["trainings"]
    assert {*found} == {"ddp", "jit", "pmap", "keras"}
    for name, verdict in found.items():
        assert (verdict["status"], verdict["place"]) == ("clean", None), name
        nodes = {node for node, each in verdict["nodes"].items() if each != "not measured"}
        assert {"examples", "sum", "update"} <= nodes, name


def test_the_first_verdict_is_that_of_the_readme():
    """Its command finds the fault, says what the page quotes, and is clean with `--right`."""
    readme = (ROOT / "README.md").read_text("utf-8")
    (line,) = re.findall("^python -m lockstep run .*first_verdict.*$", readme, re.M)
    (quoted,) = re.findall(r"```text\n(.*?)```", readme, re.DOTALL)
    folder = str(pathlib.Path(interpreter("torch")).parent)
    environment = {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
    words = shlex.split(line)
    wrong, right = (
        run([*words[:-1], words[-1] + option], environment) for option in ("", " --right")
    )
    assert (wrong.returncode, right.returncode) == (9, 0), wrong.stderr + right.stderr
    for part in quoted.split("…"):
        assert " ".join(part.split()) in " ".join(wrong.stdout.split())
