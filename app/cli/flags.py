"""Every flag of the program; the only place that reads them. Nothing here imports TensorFlow."""

import difflib
import re
import sys
from collections.abc import Iterable

from absl import flags

from app.cli.usage import help_text
from app.config import Config
from app.config.flag_groups import BOOL, FLOAT, GROUPS, INT, INTS, LIST, OF_ABSL
from app.config.options import COMMANDS, WORDS
from app.demos.registry import check_options
from app.runtime import console
from app.runtime.errors import ConfigError

FLAGS = flags.FLAGS

_HELP = {"h", "help", "helpshort", "helpfull", "helpxml"}
_ALIASES = {"batch_size": "global_batch_size", "lr": "learning_rate"}


def define_flags() -> None:
    """Defines every flag once; absl has no defaults here, `Config` has."""
    for group in GROUPS.values():
        for name, (kind, _, text) in group.items():
            if kind == BOOL:
                flags.DEFINE_bool(name, None, text)
            elif kind == INT:
                flags.DEFINE_integer(name, None, text)
            elif kind == FLOAT:
                flags.DEFINE_float(name, None, text)
            elif kind in (LIST, INTS):
                flags.DEFINE_list(name, None, text)
            elif kind != OF_ABSL:
                flags.DEFINE_string(name, None, text)
    for alias, name in _ALIASES.items():
        flags.DEFINE_alias(alias, name)


def parse_config(argv: list[str]) -> Config:
    """Turns the command line into a `Config`, or prints the help and exits.

    Args:
        argv: the program's arguments, its own name first.

    Raises:
        ConfigError: an unknown flag or command, a stray word or a value that cannot be meant.
    """
    words = [word for word in argv[1:] if not word.startswith("-")]
    if words[:1] == ["help"] or any(_flag_name(word) in _HELP for word in argv[1:]):
        console.say(help_text(_command_asked_about(argv[1:], words)))
        sys.exit(0)
    words = _parse(argv)
    command = _known_command(words[0]) if words else "train"
    given, named = _given_options(command), _named_by_words(command, words[1:])
    if command == "demo":
        check_options(named["experiment"], given)
    return Config.of(command, **given, **named)


def _command_asked_about(argv: list[str], words: list[str]) -> str | None:
    """Returns the command whose help is wanted, None for that of all.

    A word that is none may be the value of a flag, unless it comes first.
    """
    if words[:1] == ["help"]:
        return _known_command(words[1]) if words[1:] else None
    if argv[0] in words:
        return _known_command(argv[0])
    return next((word for word in words if word in COMMANDS), None)


def _flag_name(word: str) -> str:
    return word.lstrip("-").partition("=")[0] if word.startswith("-") else ""


def _parse(argv: list[str]) -> list[str]:
    """Lets absl read the flags; returns the words between them."""
    try:
        return FLAGS(argv)[1:]
    except flags.IllegalFlagValueError as error:
        shown = re.match(r"flag (--\S+?):", str(error))
        raise ConfigError(
            f"{shown[1] if shown else error} — a value of the kind that --help shows is required;"
            " write --name=value"
        ) from error
    except flags.UnrecognizedFlagError as error:
        known = [name for group in GROUPS.values() for name in group] + list(_ALIASES)
        raise ConfigError(
            f"--{error.flagname} — a flag of this program is required"
            + _proposal(error.flagname, known, "--")
        ) from error
    except (flags.Error, ValueError, KeyError) as error:
        raise ConfigError(f"{error} — a flag of this program is required; see --help") from error


def _known_command(word: str) -> str:
    if word not in COMMANDS:
        raise ConfigError(
            f"{word!r} is not a command — one of {', '.join(COMMANDS)} is required"
            + _proposal(word, COMMANDS)
        )
    return word


def _named_by_words(command: str, words: list[str]) -> dict:
    """Returns what the words after the command name."""
    if command == "report":
        return {"directories": tuple(words)}
    if command in WORDS and len(words) <= 1:
        return {"experiment": "".join(words)}
    if words:
        raise ConfigError(
            f"{' '.join(words)!r} after {command} — one command and flags are required;"
            " write options as --name=value"
        )
    return {}


def _given_options(command: str) -> dict:
    """Returns the options on the command line, each of which must mean something to `command`."""
    defined = {name for group in GROUPS.values() for name in group}
    given = {name: FLAGS[name].value for name in defined if FLAGS[name].present}
    for name in given:
        if given[name] in ("", []):
            raise ConfigError(f"--{name}= is empty — a value is required; leave the flag out")
        known = {"num_devices" if n == "device_counts" else n for n in COMMANDS[command]}
        if name not in known:
            owners = [owner for owner, names in COMMANDS.items() if name in names]
            raise ConfigError(
                f"--{name} with {command} — it is an option of {', '.join(owners)}; leave it out"
            )
    kinds = {name: kind for group in GROUPS.values() for name, (kind, *_) in group.items()}
    for name, value in given.items():
        if kinds.get(name) == INTS:
            given[name] = _whole_numbers(name, value)
        elif isinstance(value, list):
            given[name] = tuple(value)
    return _with_device_counts(command, given)


def _whole_numbers(name: str, words: list[str]) -> tuple[int, ...]:
    try:
        return tuple(int(word) for word in words)
    except ValueError as error:
        raise ConfigError(
            f"--{name}={','.join(words)} — whole numbers are required, with commas between them;"
            " write --name=value"
        ) from error


def _with_device_counts(command: str, given: dict) -> dict:
    """Turns `--num_devices` into what the command calls it: several counts, or the one."""
    if "num_devices" not in given:
        return given
    counts = given.pop("num_devices")
    if "device_counts" in COMMANDS[command]:
        return {**given, "device_counts": counts}
    if len(counts) > 1:
        raise ConfigError(
            f"--num_devices={','.join(map(str, counts))} with {command} — one number is required;"
            " benchmark takes several"
        )
    return {**given, "num_devices": counts[0]}


def _proposal(word: str, known: Iterable[str], prefix: str = "") -> str:
    nearest = difflib.get_close_matches(word, known, n=1)
    return f"; did you mean {prefix}{nearest[0]}?" if nearest else "; see --help"
