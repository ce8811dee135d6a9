"""Runs a function in several worker processes of a cluster on this machine."""

import contextlib
import multiprocessing.connection
import os
from collections.abc import Callable, Sequence
from typing import Any, Self

from app.devices.local_workers import Resources, environment_of, free_ports, start_cluster
from app.runtime.errors import DeviceError, PeerLostError
from app.runtime.processes import Channel, ChildProcess, Result
from app.runtime.subprocesses import limit_cores

_SETTLE_SEC = 2.0  # In which the original failure and its consequences are told apart.


class WorkerGroup:
    """Runs several worker processes behind the interface of `ChildProcess`.

    Sends each message to all workers and receives only the chief's messages.

    Args:
        shares: resources of each worker.
        function: see `ChildProcess`; it reads its cluster from the environment.
        *arguments: further arguments of the function.
    """

    def __init__(self, shares: Sequence[Resources], function: Callable[..., Any], *arguments: Any):
        clusters = start_cluster(free_ports(len(shares)))
        self._processes = [
            ChildProcess(
                _be_worker,
                *(cluster.index, share.cores, function, *arguments),
                environment=environment_of(cluster, share),
            )
            for cluster, share in zip(clusters, shares, strict=True)
        ]
        self._results: dict[int, object] = {}

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as stack:
            for process in self._processes:
                stack.enter_context(process)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *exception: object) -> None:
        self._stack.close()

    @property
    def pid(self) -> int:
        """The chief's process id."""
        return self._processes[0].pid

    def send(self, message: Any) -> None:
        """Sends a message to all workers."""
        for process in self._processes:
            process.send(message)

    def receive(self) -> tuple[str, Any]:
        """Waits for the chief's `("message", …)`, or for `("result", results of all workers)`.

        Raises:
            The exception of the worker that failed first, as `ChildProcess.receive` raises it.
        """
        while len(self._results) < len(self._processes):
            for index in self._ready(None):
                try:
                    kind, value = self._processes[index].receive()
                except PeerLostError:
                    self._raise_cause(index)
                    raise
                if kind == "message":
                    return kind, value
                self._results[index] = value
        return "result", [self._results[index] for index in range(len(self._processes))]

    def _ready(self, timeout_sec: float | None) -> list[int]:
        """Waits for workers without a result; returns those that have sent something."""
        waiting = {p.connection: i for i, p in enumerate(self._processes) if i not in self._results}
        ready = multiprocessing.connection.wait(list(waiting), timeout_sec)
        return [index for connection, index in waiting.items() if connection in ready]

    def _raise_cause(self, index: int) -> None:
        """Raises the exception of a worker that failed on its own, not as another was lost."""
        self._results[index] = None
        for other in self._ready(_SETTLE_SEC):
            with contextlib.suppress(PeerLostError, DeviceError):
                self._processes[other].receive()


def _be_worker(
    channel: Channel,
    index: int,
    cores: Sequence[int],
    function: Callable[..., Result],
    *arguments: Any,
) -> Result:
    """Runs `function` in a new process, on the cores of one worker."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # The parent process prints.
    limit_cores(cores)
    send = channel.send if index == 0 else lambda message: None
    return function(channel._replace(send=send), *arguments)
