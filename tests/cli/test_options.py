"""Tests options as a user sees them: flags, help, and the config of a command.

`messages.txt` has what is refused, with its message.
"""

import pytest

from app.errors import ConfigError
from app.options import Config, parse_command_line
from app.options.help import PAGE, option_page
from app.options.table import COMMANDS, options_of
from tests.conftest import assert_ok, run_main, run_python


def parse(*words: str) -> Config:
    return parse_command_line(["main.py", *words])


def shown(capsys, *words: str) -> str:
    """Returns what a command line prints that runs no command."""
    with pytest.raises(SystemExit, match=r"^0$"):
        parse(*words)
    return capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("epochs", (2.5, True, None, [1])), ("learning_rate", (float("nan"), float("-inf"))),
        ("model", (None, ["lenet"])), ("deterministic", (2, None)), ("out", (3,)),
    ],
)  # fmt: skip
def test_values_of_programs_are_checked_like_those_of_the_command_line(name, values):
    for value in values:
        with pytest.raises(ConfigError, match=f"^--{name} must be "):
            Config.of(**{name: value})


def test_values_of_programs_are_accepted_in_their_types():
    config = Config.of("compare", epochs=9, lr=5, strategies=["manual", "sharded"])
    assert (config.training.epochs, config.training.learning_rate) == (9, 5.0)
    assert config.strategies == ("manual", "sharded")


def test_numbers_of_devices_of_a_command_and_of_its_trainings():
    assert Config.of(strategy="single").num_devices == 1
    assert Config.of().num_devices is None and Config.of(device="cpu").num_devices == 2
    assert Config.of(strategy="multi_worker", num_workers=3).num_devices is None
    # Beside workers, others have as many replicas on one machine.
    config = Config.of("verify", strategies=("single", "manual", "multi_worker"), num_workers=3)
    assert config.num_devices == 3
    of_workers = config.for_training("multi_worker").distribution
    assert (of_workers.num_gpus, of_workers.num_workers) == (1, 3)
    assert config.for_training("manual").distribution.num_gpus == 3
    assert config.for_training("single").distribution.num_gpus is None
    assert config.for_training("manual", num_gpus=5).num_devices == 5


def test_an_option_goes_to_the_strategies_that_have_it_and_to_no_other():
    names = ("single", "mirrored", "multi_worker")
    options = {"all_reduce": "ring", "batch_norm": "sync", "seed": 3, "inject": "drop_gradient"}
    config = Config.of("verify", strategies=names, **options)
    changed = {name: config.for_training(name).changed().keys() for name in names}
    of_mirrored = {*options, "strategy", "num_gpus"}
    assert changed == {
        "single": {"seed", "strategy"},
        "mirrored": of_mirrored,  # Of the strategies with replicas, the first has the fault.
        "multi_worker": {*of_mirrored, "num_workers"} - {"inject"},
    }


def test_a_run_is_another_run_if_an_option_that_affects_its_result_is():
    fields = Config.of(seed=3, inject="drop_gradient", num_gpus=2).result_fields()
    assert (fields["command"], fields["seed"], fields["num_gpus"]) == ("train", 3, 2)
    assert fields["inject"] == "drop_gradient:replica=1"
    others = {"out": "o", "overwrite": True, "checkpoint_every": 3, "verify_every": 1}
    assert Config.of(**others, data_dir="d").result_fields() == Config.of().result_fields()


def test_the_help_has_each_command_and_that_of_a_command_its_options_and_examples(capsys):
    text = shown(capsys, "--help")
    assert {shown(capsys, word) for word in ("-h", "help", "--helpfull")} == {text}
    assert max(map(len, text.splitlines())) <= 100
    for command, (summary, examples) in COMMANDS.items():
        assert f"  {command:<11}{summary}" in text.splitlines() and examples[0] in text
        of_command = shown(capsys, command, "--help")
        assert of_command == shown(capsys, "help", command)
        assert max(map(len, of_command.splitlines())) <= 80
        for name, row in options_of(command).items():
            assert row.is_word or f"\n  --{name}" in of_command
        for example in examples:
            config = parse(command, *example.split())
            assert example in of_command and config.command == command
            kept = [word for word in example.split() if word[:2] != "--" or "--out=" in word]
            words = ("--directories", "--experiment")  # They have no flags.
            flags = [flag for flag in config.flags() if not flag.startswith(words)]
            assert parse(command, *kept, *flags) == config  # As it is shown to be run again.


def test_the_page_of_options_is_that_of_the_program():
    """`make docs` writes it."""
    assert PAGE.read_text(encoding="utf-8") == option_page()


def test_a_terminal_without_unicode_gets_help_all_the_same():
    assert_ok(run_main("--help", env={"PYTHONIOENCODING": "ascii"}))
    refused = run_main("--epochs=ö\n", env={"PYTHONIOENCODING": "ascii"})
    assert refused.returncode == 2 and refused.stderr.count("\n") == 1


# Isolated and without site-packages, the interpreter finds no installed package.
OLD = "import runpy, sys; sys.version_info = (3, 10, 13); runpy.run_path('main.py', run_name='{}')"


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["-I", "-S", "main.py", "--help"], "TensorFlow and absl are not installed for this "),
        (["-c", OLD.format("__main__")], "Python must be 3.11 or newer, "),
    ],
)
def test_a_python_without_tensorflow_or_an_old_one_gets_one_line(words, told):
    result = run_python(*words)
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr.startswith(f"error: {told}") and result.stderr.count("\n") == 1


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
