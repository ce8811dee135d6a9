"""Tests the command line: help, choices and errors, all before TensorFlow is imported."""

import platform
import re
import shlex
import sys

import keras
import pytest
import tensorflow as tf

import app
from app.options import Config
from app.options.help_text import help_text
from app.options.table import COMMANDS, options_of
from tests.conftest import assert_ok, run_main, run_python
from tests.in_process import parse_here, run_here


def test_what_a_user_wrote_is_quoted_in_one_line():
    result = run_here("--model=a\nb")
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr.count("\n") == 1 and r"got 'a\nb'" in result.stderr


def test_flags_are_those_of_absl(tmp_path):
    """Its forms of a value, of a switch and of files; `messages.txt` has what is refused."""
    file = tmp_path / "flags"
    file.write_text("# A comment.\n--epochs=3\n\n--nooverwrite\n-seed=4\n//--seed=9\n")
    for words, expected in {
        "--epochs 2": {"epochs": 2}, "-epochs=2": {"epochs": 2}, "--epochs=0x10": {"epochs": 16},
        "--lr=1e-1": {"learning_rate": 0.1}, "--epochs=2 --epochs=5": {"epochs": 5},
        "--overwrite": {"overwrite": True}, "--overwrite --nooverwrite": {"overwrite": False},
        "--overwrite=TRUE": {"overwrite": True}, "--overwrite=0": {"overwrite": False},
        "--out=--epochs=2": {"out": "--epochs=2"}, "--undefok=xyz --noxyz --seed=2": {"seed": 2},
        "--epochs=2 --": {"epochs": 2}, f"--flagfile={file} --seed=5": {"epochs": 3, "seed": 5},
    }.items():  # fmt: skip
        assert parse_here(*words.split()) == Config.of(**expected), words


def test_the_help_of_the_program_fits_a_screen_and_has_an_example_of_each_command():
    text = help_text() + "\n"
    for word in ("--help", "-h", "help", "--helpshort"):
        result = run_here(word)
        assert (result.returncode, result.stdout, result.stderr) == (0, text, "")
    lines = text.splitlines()
    assert len(lines) <= 40 and max(map(len, lines)) <= 100
    for name, command in COMMANDS.items():
        assert f"  {name:<11}{command.summary}" in lines
        assert command.examples[0] in text


@pytest.mark.parametrize("command", COMMANDS)
def test_the_help_of_a_command_shows_its_options_and_examples_that_are_accepted(command):
    text, full_text = help_text(command), help_text(command, is_full=True)
    for words in (["help", command], [command, "--help"]):
        assert run_here(*words).stdout == text + "\n"
    for words in ([command, "--helpfull"], [command, "--help=all"]):
        assert run_here(*words).stdout == full_text + "\n"
    assert text.startswith(f"usage: python main.py {command}")
    assert max(map(len, text.splitlines())) <= 80
    usual, full = (re.findall(r"^  --(\w+)", shown, re.MULTILINE) for shown in (text, full_text))
    options = options_of(command)
    assert tuple(usual) == COMMANDS[command].usual and len(usual) <= 10
    assert sorted(full) == sorted(name for name, option in options.items() if not option.is_word)
    assert text.endswith("--helpfull") == (len(usual) < len(full))
    unwrapped = " ".join(full_text.split())
    assert ("the order of examples. [0]" in unwrapped) == ("seed" in options)  # Its default.
    for example in COMMANDS[command].examples:
        assert example in text and parse_here(command, *shlex.split(example)).command == command


def test_the_full_help_without_a_command_is_that_of_train():
    assert run_here("--helpfull").stdout == help_text("train", is_full=True) + "\n"


def test_version_names_what_results_depend_on():
    result = run_here("--version")
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout == (
        f"Lockstep {app.__version__}, Python {platform.python_version()},"
        f" TensorFlow {tf.__version__}, Keras {keras.__version__}\n"
    )


def test_a_terminal_without_unicode_gets_help_all_the_same():
    assert run_main("--help", env={"PYTHONIOENCODING": "ascii"}).returncode == 0
    refused = run_main("--epochs=0", env={"PYTHONIOENCODING": "ascii"})
    assert refused.returncode == 2 and refused.stderr.count("\n") == 1


def test_a_python_without_tensorflow_gets_one_line():
    """Isolated and without site-packages, the interpreter finds no installed package."""
    result = run_python("-I", "-S", "main.py", "--help")
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
    result = run_python("-c", script)
    assert result.returncode == 2
    assert result.stderr.startswith("error: Python ") and result.stderr.count("\n") == 1


def test_refusals_and_the_version_do_not_wait_for_tensorflow():
    script = (
        "import sys, main\n"
        "for argument, code in (('--num_devices=0', 2), ('--version', 0)):\n"
        "    try:\n        main.parse(['main.py', argument])\n"
        "    except SystemExit as end:\n        assert end.code == code\n"
        "    else:\n        sys.exit('it was not refused')\n"
        "    assert {'tensorflow', 'numpy'}.isdisjoint(sys.modules)\n"
    )
    assert_ok(run_python("-c", script))
