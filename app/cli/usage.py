"""What `--help` prints, of all commands or of one, and the table of options in the docs."""

import textwrap
from collections.abc import Iterable

from app.config import Config
from app.config.model_options import Hyperparameters
from app.config.names import GROUPS
from app.config.option import BoundOption, options_of

_WIDTH = 72
_BATCH_SIZE = Hyperparameters.global_batch_size
_BATCHES = [f"Batches are global: {_BATCH_SIZE} examples over all replicas by default."]


def help_text(config_class: type[Config] | None = None) -> str:
    """Returns the help of one command, or of the whole program: its commands and flags."""
    parts = _of_command(config_class) if config_class else _of_program()
    return "\n\n".join("\n".join(part) for part in parts)


def option_table() -> str:
    """Returns all options as Markdown: a table for each group, with the commands that have them."""
    lines = []
    for title, members in _by_group(_merged(Config.commands().values())).items():
        lines += [f"## {title}", "", "| Option | Default | What it does | Commands |"]
        lines += ["| --- | --- | --- | --- |"]
        for option in members:
            commands = [c for c, config in Config.commands().items() if _has(config, option.name)]
            value = f"={option.metavar}" if option.metavar and not _is_word(option) else ""
            shown = option.metavar if _is_word(option) else f"--{option.name}{value}"
            default = _shown_default(option) or "–"
            cells = [f"`{shown}`", default, option.metadata.help, ", ".join(commands)]
            lines.append("| " + " | ".join(cell.replace("|", r"\|") for cell in cells) + " |")
        lines.append("")
    return "\n".join(lines).rstrip()


def _of_program() -> list[list[str]]:
    commands = Config.commands()
    listed = [f"  {name:<11}{config.summary}" for name, config in commands.items()]
    return [
        ["usage: python main.py [COMMAND] [--flag=value …]"],
        ["Commands (default: train)", *listed],
        ["What matters to one of them: python main.py COMMAND --help"],
        *_groups(_merged(commands.values())),
        ["Examples", *(_examples(config)[0] for config in commands.values())],
        _BATCHES,
    ]


def _of_command(config_class: type[Config]) -> list[list[str]]:
    options = options_of(config_class)
    words = "".join(f" [{each.metavar}]" for each in options if _is_word(each))
    has_batches = _has(config_class, "global_batch_size")
    return [
        [f"usage: python main.py {config_class.command}{words} [--flag=value …]"],
        [f"{config_class.command}: {config_class.summary}"],
        ["Examples", *_examples(config_class)],
        *_groups(options),
        *([_BATCHES] if has_batches else []),
    ]


def _merged(config_classes: Iterable[type[Config]]) -> list[BoundOption]:
    """Returns each option once, as the first command that has it defines it."""
    merged: dict[str, BoundOption] = {}
    for config_class in config_classes:
        for option in options_of(config_class):
            merged.setdefault(option.name, option)
    return list(merged.values())


def _has(config_class: type[Config], name: str) -> bool:
    return any(each.name == name for each in options_of(config_class))


def _is_word(option: BoundOption) -> bool:
    return option.metadata.positional


def _examples(config_class: type[Config]) -> list[str]:
    prefix = "" if config_class.command == "train" else f" {config_class.command}"
    return [f"  python main.py{prefix} {line}".rstrip() for line in config_class.examples]


def _by_group(options: Iterable[BoundOption]) -> dict[str, list[BoundOption]]:
    """Returns title → options, groups without any left out."""
    options = list(options)
    groups = {t: [each for each in options if each.metadata.group == t] for t in GROUPS}
    return {title: members for title, members in groups.items() if members}


def _groups(options: Iterable[BoundOption]) -> list[list[str]]:
    """Returns the lines of each group of flags, each flag with its default."""
    groups = []
    for title, members in _by_group(each for each in options if not _is_word(each)).items():
        lines = [title]
        for option in members:
            value = f"={option.metavar}" if option.metavar else ""
            alias = f" (--{option.metadata.alias})" if option.metadata.alias else ""
            default = _shown_default(option)
            text = f"{option.metadata.help}{alias}{f' [{default}]' if default else ''}"
            lines += [f"  --{option.name}{value}"]
            lines += [textwrap.indent(textwrap.fill(text, _WIDTH), "      ")]
        groups.append(lines)
    return groups


def _shown_default(option: BoundOption) -> str:
    default = option.default
    if default is None or default is False or default in ((), ""):
        return ""
    return ",".join(map(str, default)) if isinstance(default, tuple) else str(default)
