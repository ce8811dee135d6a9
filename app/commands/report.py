"""`report`: writes a page about finished runs, or serves a page about a training in progress."""

import pathlib

from app.config import ReportConfig
from app.records.run_naming import named_path
from app.runtime import console


def run(config: ReportConfig) -> None:
    """Writes the page to `--out`, or beside its runs; does not train.

    With `--watch`, serves the page of the newest training until Ctrl-C.
    """
    directories = [named_path(word) for word in config.directories]
    if config.watch:
        _watch(directories or [pathlib.Path("runs")], config.port)
        return
    from app.report.page import REPORT_FILE, write_report

    beside = directories[0] if len(directories) == 1 else pathlib.Path()
    path = named_path(config.out) if config.out else beside / REPORT_FILE
    write_report(directories, path)
    console.say(f"saved {path}")


def _watch(directories: list[pathlib.Path], port: int | None) -> None:
    from app.report.live_page import LivePage
    from app.report.live_server import open_server

    with open_server(port, LivePage(directories)) as server:
        shown = ", ".join(map(str, directories))
        console.say(f"{shown}: open {server.url} in a browser; Ctrl-C closes the page")
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            console.say("page closed; a training is not affected")
