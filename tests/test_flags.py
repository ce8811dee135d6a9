"""Tests the command line: help, choices and errors, all before TensorFlow is imported."""

import importlib.metadata
import platform
import re
import shlex
import subprocess
import sys

import keras
import pytest
import tensorflow as tf

import app
from app.options import Config
from app.options.help_text import help_text, version_text
from app.options.table import COMMANDS, options_of
from conftest import ROOT, copy_program, run_main
from in_process import parse_here, run_here


def refuse(*arguments):
    """Parses the command line, asserts exit code 2 and returns the one line of the refusal."""
    result = run_here(*arguments)
    assert result.returncode == 2, result.stdout + result.stderr
    assert result.stdout == ""
    lines = result.stderr.splitlines()
    assert len(lines) == 1 and lines[0].startswith("error: "), result.stderr
    return lines[0]


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--num_devices=0"], "--num_devices must be a whole number between 1 and 64, got 0"),
        (["--global_batch_size=1", "--num_devices=2"], "the number of replicas, 2, got 1"),
        (["--model=resnet19"], "--model must be one of lenet, resnet9, resnet18, got"),
        (["--epochs=many"], "--epochs must be a whole number between 1 and 100000, got many"),
        (["--jit_compile=maybe"], "--jit_compile must be true or false, got 'maybe'"),
        (["--modle=lenet"], "--modle is not a flag; did you mean --model?"),
        (["--batchsize=2"], "did you mean --batch_size?"),
        (["help", "verfy"], "did you mean verify?"),
        (["bnchmark", "--help"], "did you mean benchmark?"),
        (["report"], "report needs the directory of a run"),
        (["demo", "allreduce", "twice"], "demo takes one EXPERIMENT, got 'allreduce twice'"),
        (["trian"], "did you mean train?"),
        (["train", "twice"], "'twice'"),
        (["evaluate", "--run=x", "--epochs=3"], "not an option of evaluate, only of train, "),
        (["compare", "--strategy=manual"], "--strategy is not an option of compare"),
        (["benchmark", "--num_devices=1,x"], "separated by commas, got 1,x"),
        (["--num_devices=1,2"], "--num_devices must be a whole number between 1 and 64, got 1,2"),
        (["--out="], "--out has no value"),
        (["--model=a\nb"], r"got 'a\nb'"),
        (["--lr=1e39"], "--learning_rate"),
        (["--lr=nan"], "--learning_rate must be a number above 0"),
        (["--shard_weights=3,x"], "--shard_weights must be whole numbers between 1 and 1000"),
        (["--schedule=zero"], "--schedule must be one of gpipe, 1f1b, got 'zero'"),
        (["--strategy=pipeline", "--micro_batches=0"], "between 1 and 1024, got 0"),
        (["--verbosity=7"], "--verbosity must be a whole number between -1 and 1, got 7"),
    ],
)
def test_one_line_and_code_2(arguments, told):
    assert told in refuse(*arguments)


def test_help_after_a_command_is_of_that_command():
    assert run_here("verify", "--steps=3", "--help").stdout == help_text("verify") + "\n"
    assert run_here("help", "doctor").stdout == help_text("doctor") + "\n"


@pytest.mark.parametrize("word", ["--help", "-h", "help", "--helpshort"])
def test_help_shows_commands_first_and_every_default(word):
    result = run_here(word)
    assert result.returncode == 0 and result.stderr == ""
    assert result.stdout.index("compare") < result.stdout.index("--model=")
    assert "[256]" in result.stdout and "[d2l]" in result.stdout
    assert "the order of examples. [0]" in result.stdout
    assert max(map(len, result.stdout.splitlines())) <= 80


@pytest.mark.parametrize("command", COMMANDS)
def test_the_help_of_a_command_shows_its_own_flags_and_no_others(command):
    text = help_text(command)
    assert text.startswith(f"usage: python main.py {command}") and "Examples" in text
    assert max(map(len, text.splitlines())) <= 80
    options = {name for name, o in options_of(command).items() if not o.is_word}
    assert set(re.findall(r"^  --(\w+)", text, re.MULTILINE)) == options


@pytest.mark.parametrize(
    "command, first",
    [
        ("train", "strategy"),
        ("verify", "steps"),
        ("benchmark", "repeats"),
        ("report", "out"),
        ("evaluate", "run"),
    ],
)
def test_the_help_of_a_command_starts_with_the_flags_that_matter_to_it(command, first):
    text = help_text(command)
    assert re.findall(r"^  --(\w+)", text, re.MULTILINE)[0] == first
    assert text.index(f"--{first}") < text.index("Examples")


@pytest.mark.parametrize("registry", ["models", "strategies"])
def test_help_lists_a_new_model_and_a_new_strategy(tmp_path, registry):
    """One line in the registry is enough."""
    copy_program(tmp_path)
    path = tmp_path / registry / "__init__.py"
    text = path.read_text(encoding="utf-8")
    line = f'    "brand_new": "{registry}.brand_new:Something",\n'
    path.write_text(
        re.sub(r'(?=^    "(?:lenet|single)": )', line, text, flags=re.M), encoding="utf-8"
    )
    result = subprocess.run(
        [sys.executable, "main.py", "--help"],
        capture_output=True, text=True, cwd=tmp_path, check=True,
    )  # fmt: skip
    assert "=brand_new|" in result.stdout


def test_version_names_what_results_depend_on():
    result = run_here("--version")
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout == (
        f"Lockstep {app.__version__}, Python {platform.python_version()},"
        f" TensorFlow {tf.__version__}, Keras {keras.__version__}\n"
    )


def test_version_of_a_package_that_is_not_installed(monkeypatch):
    def version(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    assert version_text().endswith("TensorFlow not installed, Keras not installed")


def test_every_example_of_the_help_is_a_command_line():
    examples = [f"{name} {e}" for name, command in COMMANDS.items() for e in command.examples]
    assert {shlex.split(e)[0] for e in examples} == set(COMMANDS)
    for example in examples:
        assert isinstance(parse_here(*shlex.split(example)), Config), example


def test_a_terminal_without_unicode_gets_help_all_the_same():
    assert run_main("--help", env={"PYTHONIOENCODING": "ascii"}).returncode == 0
    refused = run_main("--epochs=0", env={"PYTHONIOENCODING": "ascii"})
    assert refused.returncode == 2 and refused.stderr.count("\n") == 1


def test_a_python_without_tensorflow_gets_one_line():
    """Isolated and without site-packages, the interpreter finds no installed package."""
    result = subprocess.run(
        [sys.executable, "-I", "-S", str(ROOT / "main.py"), "--help"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr == (
        f"error: TensorFlow and absl are not installed for this Python ({sys.executable}); run"
        " `make setup`, then `.venv/bin/python main.py`\n"
    )


def test_an_old_python_is_refused_in_one_line():
    """Pretended: the version is lowered before the program is read."""
    script = (
        "import runpy, sys\n"
        "sys.version_info = (3, 10, 13, 'final', 0)\n"
        "runpy.run_path('main.py', run_name='__main__')\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT, check=False
    )
    assert result.returncode == 2
    assert result.stderr.startswith("error: Python ") and result.stderr.count("\n") == 1


@pytest.mark.parametrize("argument, code", [("--num_devices=0", 2), ("--version", 0)])
def test_refusals_and_the_version_do_not_wait_for_tensorflow(argument, code):
    script = (
        f"import sys; sys.argv = ['main.py', '{argument}']; sys.path.insert(0, '.')\n"
        "import main\n"
        "try:\n    main.parse(sys.argv)\n"
        "except SystemExit as end:\n"
        f"    assert end.code == {code}\n"
        "    assert 'tensorflow' not in sys.modules and 'numpy' not in sys.modules\n"
        "    sys.exit(77)\n"
    )
    result = subprocess.run([sys.executable, "-c", script], cwd=ROOT, check=False)
    assert result.returncode == 77
