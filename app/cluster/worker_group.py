"""Runs a function in several worker processes of a cluster on this machine."""

import contextlib
import multiprocessing.connection
import os
import time
from collections.abc import Callable, Sequence
from typing import Any, Self

from app.cluster.environment import Cluster, new_secret
from app.cluster.resource_split import WorkerResources, find_free_ports
from app.runtime.errors import DeviceError, PeerLostError
from app.runtime.processes import Channel, ChildProcess, Result
from app.runtime.subprocesses import limit_cores

_SETTLE_SEC = 2.0  # Time in which the original failure and its consequences are told apart.


class WorkerGroup:
    """Runs several worker processes behind the interface of `ChildProcess`.

    Sends each message to all workers and receives only the chief's messages.

    Args:
        shares: resources of each worker.
        function: see `ChildProcess`; it reads its cluster from the environment.
        *arguments: further arguments of the function.
    """

    def __init__(
        self, shares: Sequence[WorkerResources], function: Callable[..., Any], *arguments: Any
    ):
        addresses = tuple(f"127.0.0.1:{port}" for port in find_free_ports(len(shares)))
        secret = new_secret()
        self._processes = [
            ChildProcess(
                _be_worker,
                index,
                share,
                function,
                *arguments,
                environment=_environment(Cluster(addresses, index, secret=secret), share),
            )
            for index, share in enumerate(shares)
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
            waiting = [i for i in range(len(self._processes)) if i not in self._results]
            connections: dict[Any, int] = {self._processes[i].connection: i for i in waiting}
            for ready in multiprocessing.connection.wait(list(connections)):
                index = connections[ready]
                kind, value = self._receive_from(index, waiting)
                if kind == "message":
                    return kind, value
                self._results[index] = value
        return "result", [self._results[i] for i in range(len(self._processes))]

    def _receive_from(self, index: int, waiting: Sequence[int]) -> tuple[str, Any]:
        try:
            return self._processes[index].receive()
        except PeerLostError as follows:  # Another worker may have failed first.
            self._raise_cause([other for other in waiting if other != index])
            raise follows

    def _raise_cause(self, others: Sequence[int]) -> None:
        """Raises the exception of a worker that failed on its own, if there is one."""
        connections: dict[Any, int] = {self._processes[i].connection: i for i in others}
        deadline = time.monotonic() + _SETTLE_SEC
        while connections and (
            ready := multiprocessing.connection.wait(
                list(connections), max(0.0, deadline - time.monotonic())
            )
        ):
            for connection in ready:
                try:
                    kind, _ = self._processes[connections[connection]].receive()
                except (PeerLostError, DeviceError):  # It lost a peer, too, or has ended.
                    kind = "error"
                if kind != "message":
                    del connections[connection]


def _environment(cluster: Cluster, share: WorkerResources) -> dict[str, str]:
    """Returns the environment variables with a worker's cluster and GPUs."""
    environment = cluster.as_environment()
    if share.gpus is not None:
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(share.gpus)
    return environment


def _be_worker(
    channel: Channel,
    index: int,
    share: WorkerResources,
    function: Callable[..., Result],
    *arguments: Any,
) -> Result:
    """Runs `function` in a new process, on the cores of one worker."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # The parent process prints.
    limit_cores(share.cores)
    send = channel.send if index == 0 else lambda message: None
    return function(Channel(send, channel.receive), *arguments)
