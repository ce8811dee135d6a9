"""Formats `--help`, `--version` and `docs/options.md`, which `make docs` writes."""

import importlib.metadata
import pathlib
import platform
import textwrap
from collections.abc import Iterable

import app
from app.options.option import Option
from app.options.table import COMMANDS, GROUPS, TABLE, options_of

_WIDTH = 72
_BATCHES = ["Batches are global: 256 examples over all replicas by default."]
PAGE = pathlib.Path(__file__).parents[2] / "docs" / "options.md"
_HEAD = """# Options

Every option of every command; `python main.py COMMAND --help` shows those of one command.
`make docs` makes this page from the [table of options](../app/options/table.py).
"""


def help_text(command: str | None = None) -> str:
    """Returns the help of one command, or of the program: its commands and flags."""
    parts = _of_command(command) if command else _of_program()
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
    rows = [row for row in TABLE if row.group != "benchmark" or row.name == "repeats"]
    return [
        ["usage: python main.py [COMMAND] [--flag=value …]"],
        [
            "Commands (default: train)",
            *(f"  {name:<11}{command.summary}" for name, command in COMMANDS.items()),
        ],
        ["Flags of one command: python main.py COMMAND --help"],
        *_groups(rows),
        ["Examples", *(_examples(name)[0] for name in COMMANDS)],
        _BATCHES,
    ]


def _of_command(command: str) -> list[list[str]]:
    options = options_of(command).values()
    words = "".join(f" [{option.metavar}]" for option in options if option.is_word)
    group = COMMANDS[command].first_group
    return [
        [f"usage: python main.py {command}{words} [--flag=value …]"],
        [f"{command}: {COMMANDS[command].summary}"],
        *_groups(option for option in options if option.group == group),
        ["Examples", *_examples(command)],
        *_groups(option for option in options if option.group != group),
        *([_BATCHES] if "global_batch_size" in options_of(command) else []),
    ]


def _examples(command: str) -> list[str]:
    prefix = "" if command == "train" else f" {command}"
    lines = COMMANDS[command].examples
    return [f"  python main.py{prefix} {line}".rstrip() for line in lines]


def _groups(options: Iterable[Option]) -> list[list[str]]:
    """Returns the lines of each group of flags, with defaults."""
    options = [option for option in options if not option.is_word]
    groups = []
    for group in GROUPS:
        lines = [group.capitalize()]
        for option in (option for option in options if option.group == group):
            alias = f" (--{option.alias})" if option.alias else ""
            default = shown_default(option)
            text = f"{option.help}{alias}{f' [{default}]' if default else ''}"
            lines += [f"  {_written(option)}"]
            lines += [textwrap.indent(textwrap.fill(text, _WIDTH), "      ")]
        groups.append(lines)
    return [lines for lines in groups if lines[1:]]


def _written(option: Option) -> str:
    if option.is_word:
        return option.metavar
    return f"{option.flag}={option.placeholder}" if option.placeholder else option.flag


def shown_default(option: Option) -> str:
    """Returns a default as `--help` shows it, "" for none."""
    default = option.default
    if default is None or default is False or default in ((), ""):
        return ""
    return ",".join(map(str, default)) if isinstance(default, tuple) else str(default)


def option_page() -> str:
    """Returns `docs/options.md`: a table for each group, with the commands of each option."""
    lines = [_HEAD]
    for group in GROUPS:
        lines += [f"## {group.capitalize()}", "", "| Option | Default | What it does | Commands |"]
        lines += ["| --- | --- | --- | --- |"]
        for option in (row for row in TABLE if row.group == group):
            cells = [f"`{_written(option)}`", shown_default(option) or "–"]
            cells += [option.help, ", ".join(option.commands)]
            lines.append("| " + " | ".join(cell.replace("|", r"\|") for cell in cells) + " |")
        lines.append("")
    return "\n".join(lines)


if __name__ == "__main__":
    PAGE.write_text(option_page(), encoding="utf-8")
