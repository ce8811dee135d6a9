"""Formats `--help`, `--version` and `docs/options.md`, which `make docs` writes."""

import importlib.metadata
import pathlib
import platform
import re
import textwrap
from collections.abc import Iterable

import app
from app.options.option import Option
from app.options.table import COMMANDS, GROUPS, PARTS, TABLE, options_of
from app.runtime import kernels

_WIDTH = 72
PAGE = pathlib.Path(__file__).parents[2] / "docs" / "options.md"
# Name → help of an environment variable that every command reads which imports TensorFlow.
_ENVIRONMENT = {
    kernels.VARIABLE: "Kernels of the CPU: 1 for oneDNN, 0 for Eigen. Default: 1 on x86 processors"
    " with AVX2, else TensorFlow's choice.",
}
_HEAD = """# Options

`python main.py COMMAND --help` shows the common options of a command, `--helpfull` all of them.
Defaults are in brackets; commands that differ from those of the group follow in parentheses.
`make docs` makes this page from the [table of options](../app/options/table.py).
"""


def help_text(command: str | None = None, *, is_full: bool = False) -> str:
    """Returns the help of one command, or of the program: its commands.

    Args:
        command: name of the command; None for the program.
        is_full: whether to show every option of the command, instead of the common ones.
    """
    if command is None:
        parts = _of_program()
    elif is_full:
        parts = [*_usage(command), ["Examples", *_examples(command)], *_groups(command)]
        parts += [_environment()] if command != "report" else []
    elif command == "verify":
        recordings = "Recordings of your own scripts: python -m lockstep --help"
        parts = [*_usage(command), *_parts_of_verify(), [recordings], *_more(command)]
    else:
        parts = [*_usage(command), ["Examples", *_examples(command)]]
        parts += [["Options", *_lines(_common(command))]]
        parts += [_environment()] if command == "benchmark" else []
        parts += _more(command)
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
    commands = []
    for name, command in COMMANDS.items():
        commands += [f"  {name:<11}{command.summary}", f"             {_examples(name)[0].strip()}"]
    return [
        ["usage: python main.py [COMMAND] [--flag=value …]"],
        ["Commands (default: train), each with an example", *commands],
        [
            "More",
            "  python main.py COMMAND --help      examples and common options of a command",
            "  python main.py COMMAND --helpfull  every option of a command",
            "  python main.py --version           versions of Lockstep, TensorFlow and Keras",
            "  docs/tour.md                       a tour; README.md lists the other pages",
        ],
    ]


def _usage(command: str) -> list[list[str]]:
    options = options_of(command).values()
    words = "".join(f" [{option.metavar}]" for option in options if option.is_word)
    return [
        [f"usage: python main.py {command}{words} [--flag=value …]"],
        [f"{command}: {COMMANDS[command].summary}"],
    ]


def _more(command: str) -> list[list[str]]:
    """Returns how to see all options of a command, if it has more than the common ones."""
    number = sum(not option.is_word for option in options_of(command).values())
    if number == len(_common(command)):
        return []
    return [[f"All {number} options: python main.py {command} --helpfull"]]


def _common(command: str) -> list[Option]:
    return [option for option in options_of(command).values() if option.common]


def _parts_of_verify() -> list[list[str]]:
    """Returns the options and examples of each part; an option is described where it is first."""
    parts, shown = [], list[Option]()
    for part, title in PARTS.items():
        options = [option for option in _common("verify") if part in option.parts]
        also = [option.flag for option in options if option in shown and option.name != "out"]
        new = [option for option in options if option not in shown]
        new.sort(key=lambda option: option.name != part)
        examples = [line for line in _examples("verify") if f" --{part}=" in line]
        parts.append([title, *examples, *_lines(new)])
        if also:
            parts[-1] += textwrap.wrap(
                f"  Also {', '.join(also)}", _WIDTH, subsequent_indent="       "
            )
        shown += new
    return parts


def _examples(command: str) -> list[str]:
    prefix = "" if command == "train" else f" {command}"
    lines = COMMANDS[command].examples
    return [f"  python main.py{prefix} {line}".rstrip() for line in lines]


def _groups(command: str) -> list[list[str]]:
    """Returns the lines of each group of options."""
    options = [option for option in options_of(command).values() if not option.is_word]
    groups = []
    for group in GROUPS:
        lines = _lines(option for option in options if option.group == group)
        groups.append([group.capitalize(), *lines])
    return [lines for lines in groups if lines[1:]]


def _environment() -> list[str]:
    lines = ["Environment"]
    for name, text in _ENVIRONMENT.items():
        lines += [f"  {name}", textwrap.indent(textwrap.fill(text, _WIDTH), "      ")]
    return lines


def _lines(options: Iterable[Option]) -> list[str]:
    """Returns the lines of each option, with its default."""
    lines = []
    for option in options:
        alias = f" (--{option.alias})" if option.alias else ""
        default = shown_default(option)
        text = f"{option.help}{alias}{f' [{default}]' if default else ''}"
        lines += [f"  {_written(option)}"]
        lines += [textwrap.indent(textwrap.fill(text, _WIDTH), "      ")]
    return lines


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
    """Returns `docs/options.md`: a list for each group, with the commands of its options."""
    lines = [_HEAD]
    for group in GROUPS:
        options = [option for option in TABLE if option.group == group]
        commands = [option.commands for option in options]
        usual = max(commands, key=commands.count)
        lines += [f"## {group.capitalize()}", "", f"Commands: {_shown_commands(usual)}.", ""]
        for option in options:
            default = shown_default(option)
            line = f"- `{_written(option)}`{f' [{default}]' if default else ''}"
            line += f" or `--{option.alias}`" if option.alias else ""
            line += f": {_help_of_all_commands(option)}"
            lines.append(line + _difference(option.commands, usual))
        lines.append("")
    lines += ["## Environment", ""]
    lines += [*(f"- `{name}`: {text}" for name, text in _ENVIRONMENT.items()), ""]
    return "\n".join(lines)


def _shown_commands(commands: Iterable[str]) -> str:
    """Returns the names of the commands, or those that are missing where these are few."""
    missing = [command for command in COMMANDS if command not in commands]
    return f"all but {' and '.join(missing)}" if len(missing) < 3 else ", ".join(commands)


def _difference(commands: tuple[str, ...], usual: tuple[str, ...]) -> str:
    """Returns the commands of an option in parentheses, "" for those of the group."""
    if commands == usual:
        return ""
    added = [command for command in commands if command not in usual]
    if len(added) < 3 and len(added) + len(usual) == len(commands):
        return f" (also {' and '.join(added)})"
    return f" ({_shown_commands(commands)})"


def _help_of_all_commands(option: Option) -> str:
    """Returns the help text, and each sentence that only some commands add, after their names."""
    commands_of = dict[str, list[str]]()
    for command, differences in option.differs.items():
        text = differences.get("help", "").removeprefix(option.help).strip()
        for sentence in re.split(r"(?<=\.) ", text) if text else []:
            commands_of.setdefault(sentence, []).append(command)
    added = [f"{', '.join(names)}: {sentence}" for sentence, names in commands_of.items()]
    return " ".join([option.help, *added]).replace("<", r"\<")  # "<time>" is no tag of HTML.


if __name__ == "__main__":
    PAGE.write_text(option_page(), encoding="utf-8")
