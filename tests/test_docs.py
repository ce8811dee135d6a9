"""What docs/verify.md tells a reader to do, done in a copy of the program."""

import re
import shlex
import subprocess
import sys

import pytest

from conftest import ROOT, copy_program, program_environment

TEXT = (ROOT / "docs" / "verify.md").read_text(encoding="utf-8")
COMMANDS = re.findall(r"```sh\npython main\.py (.*?)\n```", TEXT)
BLOCKS = dict(re.findall(r"```python\n# (\S+)\n(.*?)```", TEXT, re.DOTALL))
ODD_ONE = " + ([partial[-1]] if len(partial) % 2 else [])"


@pytest.fixture(scope="module")
def copy(tmp_path_factory):
    """The program with the reader's own model and all-reduce in it."""
    folder = tmp_path_factory.mktemp("copy")
    copy_program(folder)
    (folder / "models" / "mlp.py").write_text(BLOCKS["models/mlp.py"])
    edit(
        folder / "models" / "__init__.py",
        (
            'MODELS = {"lenet"',
            'from models.mlp import build_mlp\n\nMODELS = {"mlp": build_mlp, "lenet"',
        ),
    )
    (folder / "strategies" / "averaging.py").write_text(BLOCKS["strategies/averaging.py"])
    edit(
        folder / "strategies" / "__init__.py",
        ("\n\nSTRATEGIES", "\nfrom strategies.averaging import AveragingStrategy\n\nSTRATEGIES"),
        ("for strategy in (", "for strategy in (AveragingStrategy, "),
    )
    edit(
        folder / "app" / "options.py",
        ('STRATEGY_NAMES = ("single"', 'STRATEGY_NAMES = ("averaging", "single"'),
        ('MODEL_NAMES = ("lenet"', 'MODEL_NAMES = ("mlp", "lenet"'),
        ('    "manual": (', '    "manual": ("pairwise", '),
    )
    edit(
        folder / "strategies" / "collectives.py",
        (
            "\n\ndef all_reduce(",
            "\n\n" + BLOCKS["strategies/collectives.py"] + "\n\ndef all_reduce(",
        ),
    )
    return folder


def edit(path, *changes):
    text = path.read_text()
    for old, new in changes:
        assert text.count(old) == 1, (path, old)
        text = text.replace(old, new)
    path.write_text(text)


def run(copy, arguments, small_data):
    return subprocess.run(
        [sys.executable, "main.py", *shlex.split(arguments), "--allow_unverified_data"],
        capture_output=True, text=True, cwd=copy, timeout=300, check=False,
        env=program_environment(FASHION_MNIST_DIR=str(small_data)),
    )  # fmt: skip


def test_one_s_own_model_is_verified(copy, small_data):
    (command,) = (c for c in COMMANDS if "--model=mlp" in c)
    result = run(copy, command, small_data)
    assert result.returncode == 0, result.stdout + result.stderr
    assert re.search(r"manual – mirrored +bit-identical", result.stdout)


def test_one_s_own_all_reduce_is_verified_and_its_fault_found(copy, small_data):
    (command,) = (c for c in COMMANDS if "--all_reduce=pairwise" in c)
    result = run(copy, command, small_data)
    assert result.returncode == 0, result.stdout + result.stderr
    edit(copy / "strategies" / "collectives.py", (ODD_ONE, ""))
    result = run(copy, command, small_data)
    assert result.returncode == 6
    assert "replica 2 was lost" in result.stderr.splitlines()[-1]


def test_one_s_own_strategy_is_refused_if_it_averages(copy, small_data):
    result = run(copy, "verify --strategies=averaging --num_devices=2 --steps=1", small_data)
    assert result.returncode == 6
    assert "each replica counts 0.5 times (a mean in place of the sum)" in result.stderr
    assert "each replica counts 0.5 times (a mean in place of the sum)" in TEXT


@pytest.mark.parametrize("page", sorted((ROOT / "docs").glob("*.md")), ids=lambda path: path.name)
def test_links_lead_somewhere_and_commands_are_ones(page):
    text = page.read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)#:]+)\)", text):
        assert (ROOT / "docs" / target).exists(), target
    for command in re.findall(r"^python main\.py (.*)$", text, re.MULTILINE):
        if "=mlp" not in command and "=pairwise" not in command:  # The reader's own, tried above.
            parse = "import sys; from absl import logging; from app import flags as f;"
            parse += "f.define_flags(); f.parse_config(sys.argv)"
            arguments = [sys.executable, "-c", parse, *shlex.split(command)]
            subprocess.run(arguments, cwd=ROOT, check=True)
