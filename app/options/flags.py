"""Defines the flags of a command from the table, and builds its config from the command line.

No other module reads flags. Does not import TensorFlow.
"""

import sys
from typing import Any

from absl import flags

from app.options import help_text
from app.options.config import Config, check_command, unknown_option
from app.options.option import Option, did_you_mean
from app.options.table import COMMANDS, REMOVED, TABLE, options_of
from app.runtime import console
from app.runtime.errors import ConfigError

_HELP = {"?", "h", "help", "helpshort", "helpfull", "helpxml"}
_DEFAULT_COMMAND = "train"


def parse_config(argv: list[str]) -> Config:
    """Converts the command line to a config, or prints the help or the version and exits.

    Args:
        argv: the program's arguments, starting with the program name.

    Raises:
        ConfigError: an unknown flag or command, an unexpected word, or an invalid value.
    """
    flags.FLAGS.mark_as_parsed()  # absl's own flags; the program has no others there.
    words = [word for word in argv[1:] if not word.startswith("-")]
    if words[:1] == ["help"] or any(_flag_name(word) in _HELP for word in argv[1:]):
        command = _command_asked_about(argv[1:], words)
        is_full = any(_flag_name(word) == "helpfull" or word == "--help=all" for word in argv[1:])
        if is_full and command is None:
            command = _DEFAULT_COMMAND
        console.say(help_text.help_text(command, is_full=is_full))
        sys.exit(0)
    if "--version" in argv[1:]:
        console.say(help_text.version_text())
        sys.exit(0)
    command = _command_of(argv[1:])
    check_command(command)
    values = define_flags(command)
    _, *words = _parse(values, argv, command)
    words = words[1:] if words[:1] == [command] else words  # The command may be left out.
    given = {name: values[name].value for name in options_of(command) if name in values}
    given = {name: value for name, value in given.items() if values[name].present}
    return Config.of(command, **given, **_given_words(command, words))


def define_flags(command: str) -> flags.FlagValues:
    """Defines the typed flags of a command, each without a default: the table has the defaults."""
    values = flags.FlagValues()
    for option in options_of(command).values():
        if option.is_word:
            continue
        flag = flags.Flag(_Parser(option), None, option.name, None, option.help)
        flag.boolean = option.kind is bool
        flags.DEFINE_flag(flag, values)
        if option.alias:
            flags.DEFINE_alias(option.alias, option.name, values)
    return values


class _Parser(flags.ArgumentParser):
    """Parses the text of a flag as the table says, with the parsers of absl for its type."""

    def __init__(self, option: Option) -> None:
        self._option = option

    def parse(self, argument: Any) -> Any:
        return self._option.parse(argument)


def _command_of(arguments: list[str]) -> str:
    """Returns the first word that is not the value of a flag, or the default command."""
    with_value = {row.name for row in TABLE if row.kind is not bool}
    with_value |= {row.alias for row in TABLE if row.alias}
    previous = ""
    for word in arguments:
        if not word.startswith("-") and previous.lstrip("-") not in with_value:
            return word
        previous = word if word.startswith("-") else ""
    return _DEFAULT_COMMAND


def _command_asked_about(argv: list[str], words: list[str]) -> str | None:
    """Returns the command whose help is requested; None for the program's help.

    A word that is not a command may be the value of a flag, unless it comes first.
    """
    first = words[1:2] if words[:1] == ["help"] else [word for word in argv[:1] if word in words]
    for word in first:
        check_command(word)
    return next((word for word in words if word in COMMANDS), None)


def _flag_name(word: str) -> str:
    return word.lstrip("-").partition("=")[0] if word.startswith("-") else ""


def _parse(values: flags.FlagValues, argv: list[str], command: str) -> list[str]:
    """Parses the flags with absl and returns the other words."""
    try:
        return values(argv)
    except flags.UnrecognizedFlagError as error:
        name = error.flagname
        aliases = [row.alias for row in TABLE if row.alias]
        known = list(dict.fromkeys([*(row.name for row in TABLE), *aliases]))
        if name in REMOVED or (name in known and name not in aliases):
            raise ConfigError(unknown_option(name, command)) from error
        nearest = did_you_mean(name, known, "--") or f"; see {command} --helpfull"
        raise ConfigError(f"--{name} is not a flag{nearest}") from error
    except (flags.Error, ValueError, KeyError) as error:
        problem = str(error).removeprefix("ERROR:: ")
        raise ConfigError(f"{problem}; see {command} --helpfull") from error


def _given_words(command: str, words: list[str]) -> dict[str, Any]:
    """Returns the values of the words after the command."""
    for option in options_of(command).values():
        if option.is_word and option.is_list:
            return {option.name: tuple(words)} if words else {}
        if option.is_word and len(words) <= 1:
            return {option.name: words[0]} if words else {}
        if option.is_word:
            raise ConfigError(f"{command} takes one {option.metavar}, got {' '.join(words)!r}")
    if words:
        raise ConfigError(
            f"{' '.join(words)!r} after {command} is not understood; write options as --name=value"
        )
    return {}
