"""Formats the texts of `--help` and `--version`."""

import importlib.metadata
import platform
import textwrap
from collections.abc import Iterable

import app
from app.config import Config
from app.config.model_options import Hyperparameters
from app.config.names import GROUPS
from app.config.option import BoundOption, options_of
from app.config.split_numbers import OPTIONS_OF_SOME, has_option

_WIDTH = 72
_BATCH_SIZE = Hyperparameters.global_batch_size
_BATCHES = [f"Batches are global: {_BATCH_SIZE} examples over all replicas by default."]


def help_text(config_class: type[Config] | None = None) -> str:
    """Returns the help of one command, or of the program: its commands and flags."""
    parts = _of_command(config_class) if config_class else _of_program()
    return "\n\n".join("\n".join(part) for part in parts)


def version_text() -> str:
    """Returns one line with the versions, without importing TensorFlow or Keras."""
    own = f"Lockstep {app.__version__}, Python {platform.python_version()}"
    return f"{own}, {_version_of('TensorFlow')}, {_version_of('Keras')}"


def _version_of(name: str) -> str:
    try:
        return f"{name} {importlib.metadata.version(name)}"
    except importlib.metadata.PackageNotFoundError:
        return f"{name} not installed"


def _of_program() -> list[list[str]]:
    commands = Config.commands()
    listed = [f"  {name:<11}{config.summary}" for name, config in commands.items()]
    return [
        ["usage: python main.py [COMMAND] [--flag=value …]"],
        ["Commands (default: train)", *listed],
        ["Flags of one command: python main.py COMMAND --help"],
        *_groups(merged_options(commands.values())),
        ["Examples", *(_examples(config)[0] for config in commands.values())],
        _BATCHES,
    ]


def _of_command(config_class: type[Config]) -> list[list[str]]:
    options = usable_options(config_class)
    words = "".join(f" [{each.metavar}]" for each in options if is_word(each))
    first = [each for each in options if each.metadata.group == config_class.first_group]
    rest = [each for each in options if each not in first]
    has_batches = any(each.name == "global_batch_size" for each in options)
    return [
        [f"usage: python main.py {config_class.command}{words} [--flag=value …]"],
        [f"{config_class.command}: {config_class.summary}"],
        *_groups(first),
        ["Examples", *_examples(config_class)],
        *_groups(rest),
        *([_BATCHES] if has_batches else []),
    ]


def merged_options(config_classes: Iterable[type[Config]]) -> list[BoundOption]:
    """Returns each option once, as defined by the first command that has it."""
    merged: dict[str, BoundOption] = {}
    for config_class in config_classes:
        for option in usable_options(config_class):
            merged.setdefault(option.name, option)
    return list(merged.values())


def usable_options(config_class: type[Config]) -> list[BoundOption]:
    """Returns the options of a command without those that none of its strategies has."""
    options = options_of(config_class)
    strategies = next((each.metadata.choices for each in options if each.name == "strategy"), ())
    return [
        each
        for each in options
        if not strategies
        or each.name not in OPTIONS_OF_SOME
        or any(has_option(strategy, each.name) for strategy in strategies)
    ]


def is_word(option: BoundOption) -> bool:
    """Returns whether an option's value is the words after the command."""
    return option.metadata.positional


def _examples(config_class: type[Config]) -> list[str]:
    prefix = "" if config_class.command == "train" else f" {config_class.command}"
    return [f"  python main.py{prefix} {line}".rstrip() for line in config_class.examples]


def by_group(options: Iterable[BoundOption]) -> dict[str, list[BoundOption]]:
    """Returns title → options, without empty groups."""
    options = list(options)
    groups = {t: [each for each in options if each.metadata.group == t] for t in GROUPS}
    return {title: members for title, members in groups.items() if members}


def _groups(options: Iterable[BoundOption]) -> list[list[str]]:
    """Returns the lines of each group of flags, with defaults."""
    groups = []
    for title, members in by_group(each for each in options if not is_word(each)).items():
        lines = [title]
        for option in members:
            value = f"={option.metavar}" if option.metavar else ""
            alias = f" (--{option.metadata.alias})" if option.metadata.alias else ""
            default = shown_default(option)
            text = f"{option.metadata.help}{alias}{f' [{default}]' if default else ''}"
            lines += [f"  --{option.name}{value}"]
            lines += [textwrap.indent(textwrap.fill(text, _WIDTH), "      ")]
        groups.append(lines)
    return groups


def shown_default(option: BoundOption) -> str:
    """Returns a default as `--help` shows it, "" for none."""
    default = option.default
    if default is None or default is False or default in ((), ""):
        return ""
    return ",".join(map(str, default)) if isinstance(default, tuple) else str(default)
