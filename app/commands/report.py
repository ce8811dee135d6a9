"""`report`: writes a page about finished runs."""

import pathlib

from app.config import ReportConfig
from app.records.run_naming import named_path
from app.report.page import REPORT_FILE, write_report
from app.runtime import console


def run(config: ReportConfig) -> None:
    """Writes the page to `--out`, or beside its runs; does not train."""
    directories = [named_path(word) for word in config.directories]
    beside = directories[0] if len(directories) == 1 else pathlib.Path()
    path = named_path(config.out) if config.out else beside / REPORT_FILE
    write_report(directories, path)
    console.say(f"saved {path}")
