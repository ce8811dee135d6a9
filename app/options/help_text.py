"""Formats `--help`, `--version` and `docs/options.md`, which `make docs` writes."""

import importlib.metadata
import pathlib
import platform
import textwrap
from collections.abc import Iterable

import app
from app.options.option import Option
from app.options.table import COMMANDS, GROUPS, TABLE, options_of
from app.runtime import kernels

PAGE = pathlib.Path(__file__).parents[2] / "docs" / "options.md"
_ENVIRONMENT = (
    f"{kernels.VARIABLE}: kernels of the CPU, 1 for oneDNN, 0 for Eigen. Default: 1 on x86"
    " processors with AVX2, else TensorFlow's choice."
)
_MORE = """\
More
  python main.py COMMAND --help      examples and usual options of a command
  python main.py COMMAND --helpfull  every option of a command
  python main.py --version           versions of Lockstep, TensorFlow and Keras
  docs/tour.md                       a tour; README.md lists the other pages"""
_HEAD = """# Options

`python main.py COMMAND --help` shows the usual options of a command, `--helpfull` all of them.
Defaults are in brackets, the commands that have an option in parentheses. `make docs` makes this
page from the [table of options](../app/options/table.py).
"""


def help_text(command: str | None = None, *, is_full: bool = False) -> str:
    """Returns the help of one command, or of the program: its commands.

    Args:
        command: name of the command; None for the program.
        is_full: whether to show every option of the command, instead of the usual ones.
    """
    if command is None:
        lines = ["usage: python main.py [COMMAND] [--flag=value …]", ""]
        lines += ["Commands (default: train), each with an example"]
        for name, each in COMMANDS.items():
            lines += [f"  {name:<11}{each.summary}", f"           {_examples(name)[0]}"]
        return "\n".join([*lines, "", _MORE])
    rows = options_of(command).values()
    words = "".join(f" [{row.metavar}]" for row in rows if row.is_word)
    lines = [f"usage: python main.py {command}{words} [--flag=value …]"]
    lines += ["", f"{command}: {COMMANDS[command].summary}"]
    lines += ["", "Examples", *_examples(command)]
    if is_full:
        for group in GROUPS:
            own = [row for row in rows if row.group == group and not row.is_word]
            lines += ["", group.capitalize(), *_lines(own)] if own else []
        lines += ["", "Environment", textwrap.indent(textwrap.fill(_ENVIRONMENT, 76), "  ")]
    else:
        usual = [row for name in COMMANDS[command].usual for row in rows if row.name == name]
        lines += ["", "Options", *_lines(usual)]
        if command == "verify":
            lines += ["", "Recordings of your own scripts: python -m lockstep --help"]
        number = sum(not row.is_word for row in rows)
        if number > len(usual):
            lines += ["", f"All {number} options: python main.py {command} --helpfull"]
    return "\n".join(lines)


def version_text() -> str:
    """Returns one line with the versions, without importing TensorFlow or Keras."""
    own = f"Lockstep {app.__version__}, Python {platform.python_version()}"
    return f"{own}, {_version_of('TensorFlow')}, {_version_of('Keras')}"


def _version_of(name: str) -> str:
    try:
        return f"{name} {importlib.metadata.version(name)}"
    except importlib.metadata.PackageNotFoundError:
        return f"{name} not installed"


def _examples(command: str) -> list[str]:
    prefix = "" if command == "train" else f" {command}"
    lines = COMMANDS[command].examples
    return [f"  python main.py{prefix} {line}".rstrip() for line in lines]


def _lines(rows: Iterable[Option]) -> list[str]:
    """Returns the lines of each option."""
    lines = []
    for row in rows:
        alias = f" (--{row.alias})" if row.alias else ""
        text = f"{row.help}{alias}{_default(row)}"
        lines += [f"  {_written(row)}", textwrap.indent(textwrap.fill(text, 72), "      ")]
    return lines


def _written(row: Option) -> str:
    if row.is_word:
        return row.metavar
    return f"{row.flag}={row.placeholder}" if row.placeholder else row.flag


def _default(row: Option) -> str:
    """Returns a default in brackets, "" for none."""
    default = row.default
    if default is None or default is False or default in ((), ""):
        return ""
    return f" [{','.join(map(str, default)) if isinstance(default, tuple) else default}]"


def option_page() -> str:
    """Returns `docs/options.md`: a list for each group, with the commands of each option."""
    lines = [_HEAD]
    for group in GROUPS:
        lines += [f"## {group.capitalize()}", ""]
        for row in TABLE:
            if row.group == group:
                alias = f" or `--{row.alias}`" if row.alias else ""
                help_of = row.help.replace("<", r"\<")  # "<time>" is no tag of HTML.
                commands = ", ".join(name for name in COMMANDS if name in row.commands)
                lines.append(f"- `{_written(row)}`{_default(row)}{alias}: {help_of} ({commands})")
        lines.append("")
    return "\n".join([*lines, "## Environment", "", f"{_ENVIRONMENT}", ""])


if __name__ == "__main__":
    PAGE.write_text(option_page(), encoding="utf-8")
