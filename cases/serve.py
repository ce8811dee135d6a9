"""Runs programs in processes that have imported a framework: `python -m cases.serve MODULE…`.

Reads a line of JSON for each run: `program`, `arguments`, `folder`, `log`, `environment`,
`processes` and `timeout_sec`. Forks as many processes as ranks, waits for all of them or for the
first that fails, and writes its exit code: 124 after the time limit, a negative one for a signal.
It imports nothing of this project: the interpreter may be that of another environment.
"""

import contextlib
import importlib
import json
import os
import runpy
import signal
import socket
import sys
import time
import traceback
from typing import Any

_RUNNING: list[int] = []  # Processes of the current run, which end with this one.


def main() -> None:
    """Serves requests until the end of the input."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # What a library prints is no answer.
    for name in sys.argv[1:]:
        importlib.import_module(name)
    signal.signal(signal.SIGTERM, lambda *_: (_end(), os._exit(143)))
    print("ready", file=answers, flush=True)
    for line in sys.stdin:
        print(_serve(json.loads(line)), file=answers, flush=True)


def _serve(request: dict[str, Any]) -> int:
    """Runs a program in as many processes as ranks; returns the first exit code that is not 0."""
    number = request["processes"]
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    for rank in range(number or 1):
        group = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
        group |= {name: str(rank) for name in ("RANK", "LOCAL_RANK")}
        group |= {name: str(number) for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE")}
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])  # Until the child is known.
        child = os.fork()
        if child == 0:
            _run(request, group if number else {})
        _RUNNING.append(child)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])
    code = _wait(request["timeout_sec"])
    _end()
    return code


def _run(request: dict[str, Any], group: dict[str, str]) -> None:
    """Runs the program in this process, and ends it; without a group it is the only rank."""
    os.setsid()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])
    log = os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.chdir(request["folder"])
    os.environ.update({**request["environment"], **group})
    sys.argv[:] = [request["program"], *request["arguments"]]
    code = 1
    try:
        runpy.run_path(request["program"], run_name="__main__")
        code = 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _wait(timeout_sec: float) -> int:
    """Waits for all processes of the run, or the first that fails; returns the exit code."""
    end, left = time.monotonic() + timeout_sec, [*_RUNNING]
    while left:
        for child in [*left]:
            done, status = os.waitpid(child, os.WNOHANG)
            if done and (code := os.waitstatus_to_exitcode(status)):
                return code
            if done:
                left.remove(child)
        if time.monotonic() > end:
            return 124
        time.sleep(0.02)
    return 0


def _end() -> None:
    """Ends the processes of the run, and those of their groups."""
    while _RUNNING:
        child = _RUNNING.pop()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError, ProcessLookupError):
            os.kill(child, signal.SIGKILL)  # It may not lead its group yet.
            os.waitpid(child, 0)


if __name__ == "__main__":
    main()
