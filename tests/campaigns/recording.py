"""Runs programs of PyTorch that record themselves, for several campaigns."""

import contextlib
import json
import pathlib
import sys
from collections.abc import Iterator
from typing import Any

from cases.runner import PRELOADED, RETRIED, Server, python_of
from lockstep.answer.text import line_of, sentence_of
from lockstep.engine.verdict import Verdict

from . import check

BEGIN = 'if __name__ == "__main__":'
TIMEOUT_SEC = 240


@contextlib.contextmanager
def torch_server() -> Iterator[Server]:
    """Yields a server that runs programs of PyTorch, and ends it."""
    server = Server(python_of("torch"), PRELOADED["torch"])
    try:
        yield server
    finally:
        server.end()


def changed(path: pathlib.Path, *changes: tuple[str, str], **constants: Any) -> str:
    """Returns the text of a program with changes.

    Args:
        path: the program.
        *changes: pairs of a text that occurs once, and the text that replaces it.
        **constants: values of variables of the program, which are set before it starts.

    Raises:
        CampaignError: a text that is to be replaced does not occur exactly once.
    """
    lines = [f"{name} = {value!r}" for name, value in constants.items()]
    text = path.read_text("utf-8")
    for old, new in (*changes, (BEGIN, "\n".join([*lines, "", BEGIN]))):
        check(text.count(old) == 1, f"{path.name}: {text.count(old)} times in the program: {old}")
        text = text.replace(old, new)
    return text


def record(
    server: Server, source: str, path: pathlib.Path, *, steps: int, processes: int = 0,
    replay: pathlib.Path | None = None, permute: int | None = None,
) -> None:  # fmt: skip
    """Runs a program that records itself; it and what it prints are beside the recording.

    Args:
        server: runs the program; a second time after an abort in native code.
        source: text of the program.
        path: the recording.
        steps: number of first steps to record.
        processes: number of ranks; 0 for one process without the variables of a launcher.
        replay: recording of the training whose states are loaded before each step.
        permute: seed of another order of the examples.

    Raises:
        CampaignError: the program failed.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    program, log = path.with_suffix(".py"), path.with_suffix(".log")
    program.write_text(source, "utf-8")
    replayed = None if replay is None else str(replay)
    asked = {"path": str(path), "steps": steps, "replay": replayed, "permute": permute}
    request = {
        "program": str(program), "arguments": [], "folder": str(path.parent), "log": str(log),
        "environment": {"LOCKSTEP_RECORD": json.dumps(asked)}, "processes": processes,
        "timeout_sec": TIMEOUT_SEC,
    }  # fmt: skip
    for _ in range(2):
        log.write_bytes(b"")
        code = server.run(request)
        if code not in RETRIED:
            break
        print(f"{path.name}: {RETRIED[code]}, and is run again", file=sys.stderr)
    printed = log.read_text("utf-8", "replace")
    check(code == 0, f"{path}: exit code {code}\n{printed[-1500:]}")


def shown(verdict: Verdict) -> str:
    """Returns a verdict in a line."""
    return line_of(verdict) if verdict.place else sentence_of(verdict)
