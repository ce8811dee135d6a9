"""The command line: help, choices and refusals, all before TensorFlow is imported."""

import shlex
import subprocess
import sys

import pytest

from app.cli.usage import COMMAND_HELP, help_text
from app.config.flag_groups import GROUPS
from app.config.options import COMMANDS
from conftest import ROOT, run_main


def refuse(*arguments):
    """Runs the program, asserts exit code 2 and returns the one line of the refusal."""
    result = run_main(*arguments)
    assert result.returncode == 2, result.stdout + result.stderr
    assert result.stdout == ""
    lines = result.stderr.splitlines()
    assert len(lines) == 1 and lines[0].startswith("error: "), result.stderr
    return lines[0]


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--num_devices=0"], "--num_devices=0 — 1 or more"),
        (["--global_batch_size=1", "--num_devices=2"], "use 2 or more"),
        (["--model=resnet19"], "lenet, resnet18"),
        (["--epochs=many"], "--epochs=many — a value of the kind"),
        (["--modle=lenet"], "--modle — a flag of this program is required; did you mean --model?"),
        (["--batchsize=2"], "did you mean --batch_size?"),
        (["help", "verfy"], "did you mean verify?"),
        (["bnchmark", "--help"], "did you mean benchmark?"),
        (["report"], "report without a directory"),
        (["demo", "allreduce", "twice"], "'allreduce twice' after demo"),
        (["trian"], "did you mean train?"),
        (["train", "twice"], "'twice'"),
        (["evaluate", "--run=x", "--epochs=3"], "option of train, launch, compare"),
        (["compare", "--strategy=manual"], "--strategy with compare"),
        (["--out="], "--out= is empty"),
        (["--model=a\nb"], r"--model=a\nb"),
        (["--lr=1e39"], "--learning_rate=1e+39"),
        (["--lr=nan"], "--learning_rate=nan"),
    ],
)
def test_one_line_and_code_2(arguments, told):
    assert told in refuse(*arguments)


def test_help_after_a_command_is_of_that_command():
    assert run_main("verify", "--steps=3", "--help").stdout == help_text("verify") + "\n"
    assert run_main("help", "plan").stdout == help_text("plan") + "\n"


@pytest.mark.parametrize("word", ["--help", "-h", "help", "--helpshort"])
def test_help_shows_commands_first_and_every_default(word):
    result = run_main(word)
    assert result.returncode == 0 and result.stderr == ""
    assert result.stdout.index("compare") < result.stdout.index("--model=")
    assert "[256]" in result.stdout and "[d2l]" in result.stdout
    assert "follow from it. [0]" in result.stdout
    assert max(map(len, result.stdout.splitlines())) <= 80


@pytest.mark.parametrize("command", COMMANDS)
def test_the_help_of_a_command_shows_its_own_flags_and_no_others(command):
    text = help_text(command)
    assert text.startswith(f"usage: python main.py {command}") and "Examples" in text
    assert max(map(len, text.splitlines())) <= 80
    options = {"num_devices" if name == "device_counts" else name for name in COMMANDS[command]}
    flags = [name for group in GROUPS.values() for name in group]
    shown = {name for name in flags if f"\n  --{name}=" in text or f"\n  --{name}\n" in text}
    assert shown == options


def test_every_example_of_the_help_is_a_command_line():
    parse = "import sys, shlex; from app.cli import flags as f; f.define_flags()\n"
    parse += "for line in sys.argv[1:]:\n    f.FLAGS.unparse_flags(); f.parse_config("
    parse += "['main.py', *shlex.split(line)])\n    print(line)"
    examples = [f"{name} {e}" for name, (_, *examples) in COMMAND_HELP.items() for e in examples]
    assert {shlex.split(e)[0] for e in examples} == set(COMMANDS) == set(COMMAND_HELP)
    import_absl_first = "from absl import logging\n"  # It defines --verbosity.
    result = subprocess.run(
        [sys.executable, "-c", import_absl_first + parse, *examples],
        capture_output=True, text=True, cwd=ROOT, check=False,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines() == examples


def test_a_terminal_without_unicode_gets_help_all_the_same():
    assert run_main("--help", env={"PYTHONIOENCODING": "ascii"}).returncode == 0
    assert "Traceback" not in run_main("--epochs=0", env={"PYTHONIOENCODING": "ascii"}).stderr


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


def test_refusals_do_not_wait_for_tensorflow():
    script = (
        "import sys; sys.argv = ['main.py', '--num_devices=0']; sys.path.insert(0, '.')\n"
        "import main\n"
        "main.flags.define_flags()\n"
        "try:\n    main.parse(sys.argv)\n"
        "except SystemExit as end:\n"
        "    assert end.code == 2\n"
        "    assert 'tensorflow' not in sys.modules and 'numpy' not in sys.modules\n"
        "    sys.exit(77)\n"
    )
    result = subprocess.run([sys.executable, "-c", script], cwd=ROOT, check=False)
    assert result.returncode == 77
