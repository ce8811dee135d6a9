"""Defines the flags from the options and builds the config from the flags.

No other module reads flags. Does not import TensorFlow.
"""

import re
import sys
from typing import Any

from absl import flags

from app.cli.usage import help_text, version_text
from app.config import Config
from app.config.base_config import find_command, unknown_option
from app.config.option import BoundOption, did_you_mean, options_of
from app.runtime import console
from app.runtime.errors import ConfigError

FLAGS = flags.FLAGS

_HELP = {"?", "h", "help", "helpshort", "helpfull", "helpxml"}
_OF_ABSL = {"verbosity"}  # Defined by absl's logging, with the same meaning.


def define_flags() -> None:
    """Defines every flag once, without a default; the config classes define the defaults."""
    for name, each in _all_options().items():
        if each.kind is bool:
            flags.DEFINE_bool(name, None, each.metadata.help)
        elif name not in _OF_ABSL:
            flags.DEFINE_string(name, None, each.metadata.help)
        if each.metadata.alias:
            flags.DEFINE_alias(each.metadata.alias, name)
    flags.DEFINE_bool("version", False, "Print the version, and those of TensorFlow and Keras.")


def parse_config(argv: list[str]) -> Config:
    """Converts the command line to a config, or prints the help or the version and exits.

    Args:
        argv: the program's arguments, starting with the program name.

    Raises:
        ConfigError: an unknown flag or command, an unexpected word, or an invalid value.
    """
    words = [word for word in argv[1:] if not word.startswith("-")]
    if words[:1] == ["help"] or any(_flag_name(word) in _HELP for word in argv[1:]):
        console.say(help_text(_command_asked_about(argv[1:], words)))
        sys.exit(0)
    words = _parse(argv)
    if FLAGS["version"].value:
        console.say(version_text())
        sys.exit(0)
    config_class = find_command(words[0] if words else "train")
    return config_class(**_given_flags(config_class), **_given_words(config_class, words[1:]))


def _all_options() -> dict[str, BoundOption]:
    """Returns flag name → option; a flag of several commands uses the first command's option."""
    return {
        each.name: each
        for config_class in Config.commands().values()
        for each in options_of(config_class)
        if not each.metadata.positional
    }


def _command_asked_about(argv: list[str], words: list[str]) -> type[Config] | None:
    """Returns the command whose help is requested; None for the program's help.

    A word that is not a command may be the value of a flag, unless it comes first.
    """
    if words[:1] == ["help"]:
        return find_command(words[1]) if words[1:] else None
    if argv[0] in words:
        return find_command(argv[0])
    commands = Config.commands()
    return next((commands[word] for word in words if word in commands), None)


def _flag_name(word: str) -> str:
    return word.lstrip("-").partition("=")[0] if word.startswith("-") else ""


def _parse(argv: list[str]) -> list[str]:
    """Parses the flags with absl and returns the other words."""
    try:
        return FLAGS(argv)[1:]
    except flags.UnrecognizedFlagError as error:
        options = _all_options()
        aliases = [each.metadata.alias for each in options.values() if each.metadata.alias]
        raise ConfigError(
            f"--{error.flagname} is not a flag"
            f"{did_you_mean(error.flagname, [*options, *aliases], '--') or '; see --help'}"
        ) from error
    except flags.IllegalFlagValueError as error:
        found = re.match(r"flag --(\w+)=(.*?): ", str(error), re.DOTALL)
        if found is None or found[1] not in _all_options():
            raise ConfigError(f"{error}; see --help") from error
        option = _all_options()[found[1]]
        raise ConfigError(f"{option.flag} must be {option.expected}, got {found[2]!r}") from error
    except (flags.Error, ValueError, KeyError) as error:
        raise ConfigError(f"{error}; see --help") from error


def _given_flags(config_class: type[Config]) -> dict[str, Any]:
    """Returns the values of the flags on the command line, all of them options of the command."""
    options = {each.name: each for each in options_of(config_class)}
    given = {}
    for name in _all_options():
        flag = FLAGS[name]
        if not flag.present:
            continue
        if name not in options:
            raise ConfigError(unknown_option(f"--{name}", name, config_class))
        value = flag.value
        given[name] = options[name].parse(value) if isinstance(value, str) else value
    return given


def _given_words(config_class: type[Config], words: list[str]) -> dict[str, Any]:
    """Returns the values of the words after the command."""
    positional = [each for each in options_of(config_class) if each.metadata.positional]
    if not positional:
        if words:
            raise ConfigError(
                f"{' '.join(words)!r} after {config_class.command} is not understood; write options"
                " as --name=value"
            )
        return {}
    (option,) = positional
    if option.is_list:
        return {option.name: tuple(words)}
    if len(words) > 1:
        raise ConfigError(
            f"{config_class.command} takes one {option.metavar}, got {' '.join(words)!r}"
        )
    return {option.name: words[0]} if words else {}
