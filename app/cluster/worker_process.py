"""Runs one worker process on this machine, with threads that forward its output."""

import collections
import contextlib
import dataclasses
import json
import os
import pathlib
from collections.abc import Callable
from typing import IO

from app.cluster.environment import Cluster
from app.cluster.resource_split import WorkerResources
from app.runtime.progress_bar import PROGRESS_VARIABLE
from app.runtime.run_context import PART_VARIABLE, start_thread
from app.runtime.subprocesses import Subprocess

_NUM_LAST_LINES = 5
_JOIN_SEC = 2.0  # Time to read the last lines of an ended process.


@dataclasses.dataclass(frozen=True)
class Failure:
    """Describes how a worker failed.

    Attributes:
        index: index of the worker.
        exit_code: exit code as a shell reports it.
        what: what happened, for messages.
        last_lines: the last lines that it printed.
    """

    index: int
    exit_code: int
    what: str
    last_lines: list[str]


class WorkerProcess:
    """Runs a worker process, which the constructor starts.

    Args:
        command: command line of the worker.
        environment: environment of the worker, without the variables that depend on its index.
        cluster: addresses of all workers and the index of this one.
        share: cores and GPUs of this worker.
        show: called with each progress state of the chief.
        say: called with each line that the worker prints, and whether it is on standard error.
    """

    def __init__(
        self,
        command: list[str],
        environment: dict,
        cluster: Cluster,
        share: WorkerResources,
        show: Callable[[dict], None],
        say: Callable[[str, bool], None],
    ) -> None:
        self.index, self._say = cluster.index, say
        self._last_lines: collections.deque[str] = collections.deque(maxlen=_NUM_LAST_LINES)
        environment = {
            **environment,
            **cluster.as_environment(),
            PART_VARIABLE: "1",
        }
        if share.gpus is not None:
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(share.gpus)
        progress, theirs = os.pipe()
        if cluster.is_chief:
            environment[PROGRESS_VARIABLE] = str(theirs)
        self.process = Subprocess(
            command,
            environment,
            cores=share.cores,
            is_piped=True,
            pass_fds=[theirs] if cluster.is_chief else [],
        )
        os.close(theirs)
        self._threads = [
            start_thread(self._read_lines, self.process.stdout, False),
            start_thread(self._read_lines, self.process.stderr, True),
            start_thread(_read_states, progress, show),
        ]

    def _read_lines(self, stream: IO[bytes], is_error: bool) -> None:
        with stream:
            for line in stream:
                text = line.decode(errors="replace").rstrip("\n")
                self._last_lines.append(text)
                self._say(f"[{self.index}] {text}", is_error)

    @property
    def exit_code(self) -> int | None:
        """The exit code as a shell reports it, 128 and above for a signal; None while it runs."""
        return self.process.exit_code

    @property
    def is_stopped(self) -> bool:
        """Whether the process has been suspended by a signal."""
        with contextlib.suppress(OSError, IndexError):
            stat = pathlib.Path(f"/proc/{self.process.pid}/stat").read_text(encoding="ascii")
            return stat.rpartition(")")[2].split()[0] in ("T", "t")
        return False

    def join(self) -> None:
        """Waits until all output has been forwarded."""
        for thread in self._threads:
            thread.join(_JOIN_SEC)

    def failure(self, exit_code: int, what: str) -> Failure:
        """Returns the description of a failure of this worker."""
        return Failure(self.index, exit_code, what, list(self._last_lines))


def _read_states(descriptor: int, show: Callable[[dict], None]) -> None:
    with open(descriptor, encoding="utf-8") as states:
        for line in states:
            show(json.loads(line))
