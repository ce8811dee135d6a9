"""Formats `--help`, `--version` and `docs/options.md`, which this file writes as a program."""

import importlib.metadata
import pathlib
import platform
import textwrap

from app.options.table import COMMANDS, GROUPS, TABLE, Option, options_of
from lockstep import __version__

PAGE = pathlib.Path(__file__).parents[2] / "docs" / "options.md"
_HEAD = """# Options

`python main.py COMMAND --help` shows the options of a command. Defaults are in brackets, the
commands that have an option in parentheses. `make docs` makes this page from the
[table of options](../app/options/table.py).

The variable `TF_ENABLE_ONEDNN_OPTS` chooses the kernels of the CPU, which affect the bits of a
result: 1 for oneDNN, 0 for Eigen. The default is 1 on x86 processors with AVX2.
"""


def help_text(command: str | None = None) -> str:
    """Returns the help of a command, or of the program: its commands."""
    if command is None:
        lines = ["usage: python main.py [COMMAND] [--flag=value …]", ""]
        lines += ["Commands (default: train), each with an example"]
        for name, (summary, _) in COMMANDS.items():
            lines += [f"  {name:<11}{summary}", f"             {_examples(name)[0]}"]
        lines += ["", "  python main.py COMMAND --help  options and examples of a command"]
        return "\n".join([*lines, "  python main.py --version       versions"])
    rows = options_of(command).values()
    words = "".join(f" [{row.metavar}]" for row in rows if row.is_word)
    lines = [f"usage: python main.py {command}{words} [--flag=value …]", ""]
    lines += [f"{command}: {COMMANDS[command][0]}", "", "Examples"]
    lines += [f"  {line}" for line in _examples(command)]
    for group in GROUPS:
        own = [row for row in rows if row.group == group and not row.is_word]
        lines += ["", group.capitalize()] if own else []
        for row in own:
            lines += [f"  {_written(row)}", *(f"      {t}" for t in textwrap.wrap(row.help, 72))]
    if command == "verify":
        lines += ["", "Recordings of your own scripts: python -m lockstep --help"]
    return "\n".join(lines)


def version_text() -> str:
    """Returns one line with the versions, without importing TensorFlow or Keras."""
    versions = [f"Lockstep {__version__}", f"Python {platform.python_version()}"]
    for name in ("TensorFlow", "Keras"):
        try:
            versions.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            versions.append(f"{name} not installed")
    return ", ".join(versions)


def option_page() -> str:
    """Returns the content of `docs/options.md`."""
    lines = [_HEAD]
    for group in GROUPS:
        lines += [f"## {group.capitalize()}", ""]
        for row in TABLE:
            if row.group == group:
                text = row.help.replace("<", r"\<")  # "<time>" is no tag of HTML.
                lines.append(f"- {_written(row, '`')}: {text} ({', '.join(row.commands)})")
        lines.append("")
    return "\n".join(lines)


def _examples(command: str) -> list[str]:
    prefix = "" if command == "train" else f" {command}"
    return [f"python main.py{prefix} {line}".rstrip() for line in COMMANDS[command][1]]


def _written(row: Option, quote: str = "") -> str:
    """Returns an option as it is written, with its default in brackets, and its alias."""
    text = row.metavar if row.is_word else f"--{row.name}={row.placeholder}".removesuffix("=")
    default = ",".join(row.default) if isinstance(row.default, tuple) else row.default
    shown = "" if default in (None, "") or default is False else f" [{default}]"
    alias = f" or {quote}--{row.alias}{quote}" if row.alias else ""
    return f"{quote}{text}{quote}{shown}{alias}"


if __name__ == "__main__":
    PAGE.write_text(option_page(), encoding="utf-8")
