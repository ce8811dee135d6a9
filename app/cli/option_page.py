"""Writes `docs/options.md`, the table of all options: `make docs`."""

import pathlib

from app.cli.usage import by_group, is_word, merged_options, shown_default, usable_options
from app.config import Config
from app.config.option import BoundOption

PAGE = pathlib.Path(__file__).parents[2] / "docs" / "options.md"
_HEAD = """# Options

Every option of every command; `python main.py COMMAND --help` shows those of one command.
`make docs` makes this page from the fields in [`app/config`](../app/config).
"""


def option_page() -> str:
    """Returns the page as Markdown: a table per group, with the commands that have each option."""
    lines = [_HEAD]
    for title, members in by_group(merged_options(Config.commands().values())).items():
        lines += [f"## {title}", "", "| Option | Default | What it does | Commands |"]
        lines += ["| --- | --- | --- | --- |"]
        for option in members:
            cells = [f"`{_written(option)}`", shown_default(option) or "–"]
            cells += [option.metadata.help, ", ".join(_commands_with(option))]
            lines.append("| " + " | ".join(cell.replace("|", r"\|") for cell in cells) + " |")
        lines.append("")
    return "\n".join(lines)


def _written(option: BoundOption) -> str:
    if is_word(option):
        return option.metavar
    return f"--{option.name}={option.metavar}" if option.metavar else f"--{option.name}"


def _commands_with(option: BoundOption) -> list[str]:
    commands = Config.commands().items()
    return [
        name
        for name, config in commands
        if option.name in [each.name for each in usable_options(config)]
    ]


if __name__ == "__main__":
    PAGE.write_text(option_page(), encoding="utf-8")
