"""`report`: writes a page about finished runs."""

import pathlib

from app import console
from app.options import Config
from app.records.run_directory import named_path
from app.report.page import REPORT_FILE, write_report


def run(config: Config) -> None:
    """Writes the page to `--out`, or beside its runs; does not train."""
    directories = [named_path(word) for word in config.arguments.directories]
    beside = directories[0] if len(directories) == 1 else pathlib.Path()
    path = named_path(config.output.out) if config.output.out else beside / REPORT_FILE
    write_report(directories, path)
    console.say(f"saved {path}")
