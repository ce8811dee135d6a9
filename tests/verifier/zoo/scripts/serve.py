"""Runs programs in processes that have imported a framework: `python serve.py MODULE…`.

Reads lines of JSON with `program`, `arguments`, `folder`, `environment` and `timeout_sec`; writes
the exit code of each, 124 for one that did not end, and leaves what it printed in `log`, else in
`PROGRAM.log`. With `processes`, as many run it as ranks.
"""

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


def main() -> None:
    """Serves requests until the end of the input."""
    for name in sys.argv[1:]:
        importlib.import_module(name)
    for line in sys.stdin:
        request = json.loads(line)
        child = os.fork()
        if child == 0:
            _run(request)
        print(_wait(child, request["timeout_sec"]), flush=True)


def _run(request: dict[str, Any]) -> None:
    """Runs the program in this process, and ends it."""
    os.setsid()
    path = request.get("log", f"{request['program']}.log")
    log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.chdir(request["folder"])
    os.environ |= request["environment"]
    number = request.get("processes", 1)
    others = _fork_ranks(number) if number > 1 else []
    sys.argv[:] = [request["program"], *request["arguments"]]
    code = 1
    try:
        runpy.run_path(request["program"], run_name="__main__")
        code = 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 1
    except BaseException:
        traceback.print_exc()
    for rank in others if code == 0 else ():
        code = code or os.waitstatus_to_exitcode(os.waitpid(rank, 0)[1])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _fork_ranks(number: int) -> list[int]:
    """Forks the other ranks, and sets the variables of `torch.distributed` in each process.

    Returns the numbers of the other processes in the first one.
    """
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    own, others = 0, list[int]()
    for rank in range(1, number):
        child = os.fork()
        if child == 0:
            own, others = rank, []
            break
        others.append(child)
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
    os.environ |= {name: str(own) for name in ("RANK", "LOCAL_RANK")}
    os.environ |= {name: str(number) for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE")}
    return others


def _wait(child: int, timeout_sec: float) -> int:
    """Returns the exit code of a process, and ends what it has left."""
    end, code = time.monotonic() + timeout_sec, 124
    while time.monotonic() < end:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            code = os.waitstatus_to_exitcode(status)
            break
        time.sleep(0.02)
    try:
        os.killpg(child, signal.SIGKILL)  # Other processes wait for one that failed.
    except ProcessLookupError:
        return code
    if code == 124:
        os.waitpid(child, 0)
    return code


if __name__ == "__main__":
    main()
