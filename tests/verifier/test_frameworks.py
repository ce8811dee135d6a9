"""Commands of pages that verify trainings in PyTorch and JAX: of `frameworks/` and the README."""

import gzip
import json
import os
import pathlib
import re
import shlex
import subprocess
import sys

import pytest

from app.data.fashion_mnist import SHA256, idx_bytes
from tests.conftest import ROOT, generated
from tests.verifier.recorder_scripts import interpreter, needs

pytestmark = [needs("torch", "jax"), pytest.mark.slow]
PAGE = ROOT / "docs" / "frameworks.md"


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    """The environment of the programs, with a folder of small data."""
    folder = tmp_path_factory.mktemp("data")
    data = generated(800, 200)
    arrays = (
        data.train_images[..., 0],
        data.train_labels,
        data.test_images[..., 0],
        data.test_labels,
    )
    for name, array in zip(SHA256, arrays, strict=True):
        (folder / f"{name}.gz").write_bytes(gzip.compress(idx_bytes(array)))
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


def verdicts(words, environment):
    """Returns name → record of each variant."""
    result = subprocess.run(
        [*words, "--json"], cwd=ROOT, env=environment, check=False, capture_output=True, text=True,
        timeout=500,
    )  # fmt: skip
    assert result.stdout, result.stderr
    return result.returncode, json.loads(result.stdout)["trainings"]


def test_the_command_of_the_page_finds_one_training(environment):
    code, found = verdicts(command_of_page(), environment)
    assert code == 0 and {*found} == {"ddp", "jit", "pmap", "keras"}
    for name, verdict in found.items():
        assert (verdict["status"], verdict["place"]) == ("clean", None), name
        nodes = {node for node, each in verdict["nodes"].items() if each != "not measured"}
        assert {"examples", "sum", "update"} <= nodes, name


def test_without_the_sum_of_pmap_it_is_not_all_reduced(environment, tmp_path):
    source = (ROOT / "frameworks" / "jax_lenet.py").read_text("utf-8")
    line = "        grads = jax.lax.pmean(grads, axis)\n"
    assert source.count(line) == 1
    for name in ("common.py", "jax_models.py"):
        (tmp_path / name).write_text((ROOT / "frameworks" / name).read_text("utf-8"), "utf-8")
    (tmp_path / "jax_lenet.py").write_text(source.replace(line, ""), "utf-8")
    words, wrong = command_of_page(), str(tmp_path / "jax_lenet.py")
    start = words.index("--variant")
    (pmap,) = (word for word in words if word.startswith("pmap="))
    words[start:] = ["--variant", pmap.replace("frameworks/jax_lenet.py", wrong)]
    code, found = verdicts(words, environment | {"PYTHONPATH": str(ROOT)})
    assert code == 9 and found["pmap"]["name"] == "not_all_reduced"


def test_the_first_verdict_is_that_of_the_readme():
    """Its command finds the fault, says what the page quotes, and is clean with `--right`."""
    readme = (ROOT / "README.md").read_text("utf-8")
    (line,) = re.findall("^python -m lockstep run .*first_verdict.*$", readme, re.M)
    (quoted,) = re.findall(r"```text\n(.*?)```", readme, re.DOTALL)
    folder = str(pathlib.Path(interpreter("torch")).parent)
    environment = {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
    words = shlex.split(line)
    wrong, right = (
        subprocess.run(
            [*words[:-1], words[-1] + option], cwd=ROOT, env=environment, check=False,
            capture_output=True, text=True, timeout=500,
        )
        for option in ("", " --right")
    )  # fmt: skip
    assert (wrong.returncode, right.returncode) == (9, 0), wrong.stderr + right.stderr
    for part in quoted.split("…"):
        assert " ".join(part.split()) in " ".join(wrong.stdout.split())
