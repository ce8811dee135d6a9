"""Runs programs of PyTorch that record themselves, for several campaigns."""

import contextlib
import json
import sys

from cases.runner import PRELOADED, RETRIED, Server, python_of
from lockstep.answer.text import line_of, sentence_of

from . import check

BEGIN = 'if __name__ == "__main__":'
TIMEOUT_SEC = 240


@contextlib.contextmanager
def torch_server():
    """Yields a server that runs programs of PyTorch, and ends it."""
    server = Server(python_of("torch"), PRELOADED["torch"])
    try:
        yield server
    finally:
        server.end()


def changed(path, *changes, **constants) -> str:
    """Returns the text of a program with texts that occur once replaced, and variables set."""
    lines = [f"{name} = {value!r}" for name, value in constants.items()]
    text = path.read_text("utf-8")
    for old, new in (*changes, (BEGIN, "\n".join([*lines, "", BEGIN]))):
        check(text.count(old) == 1, f"{path.name}: {text.count(old)} times in the program: {old}")
        text = text.replace(old, new)
    return text


def record(server, source, path, *, steps, processes=0, replay=None, permute=None):
    """Runs a program that records itself, in one process or as ranks; returns the recording.

    The program and what it prints are beside the recording. It is run a second time after an abort
    in native code.
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
    check(code == 0, f"{path}: exit code {code}\n{log.read_text('utf-8', 'replace')[-1500:]}")
    return path


def shown(verdict) -> str:
    """Returns a verdict in a line."""
    return line_of(verdict) if verdict.place else sentence_of(verdict)
