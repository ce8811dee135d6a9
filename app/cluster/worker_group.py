"""A function that runs as every worker of a cluster on this machine, each in its own process."""

import contextlib
import multiprocessing.connection
import os
import time
from collections.abc import Callable, Sequence
from typing import Any, Self

from app.cluster.environment import Cluster
from app.cluster.resource_split import WorkerResources, find_free_ports
from app.runtime.errors import DeviceError, PeerLostError
from app.runtime.function_call import Channel
from app.runtime.processes import ChildProcess, Result
from app.runtime.subprocesses import limit_cores

_SETTLE_SEC = 2.0  # Within it, the first failure and what follows from it are told apart.


class WorkerGroup:
    """Several processes in place of one `ChildProcess`, and talked to in the same way.

    What is sent reaches all of them; the chief's messages come back, and nobody else's.

    Args:
        shares: what each worker is given of the machine.
        function: see `ChildProcess`; it finds its cluster in the environment.
        *arguments: the others.
    """

    def __init__(
        self, shares: Sequence[WorkerResources], function: Callable[..., Any], *arguments: Any
    ):
        addresses = tuple(f"127.0.0.1:{port}" for port in find_free_ports(len(shares)))
        self._processes = [
            ChildProcess(
                _be_worker,
                index,
                share,
                function,
                *arguments,
                environment=_environment(Cluster(addresses, index), share),
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
        """The number of the chief's process."""
        return self._processes[0].pid

    def send(self, message: Any) -> None:
        """Hands all of them a message."""
        for process in self._processes:
            process.send(message)

    def receive(self) -> tuple[str, Any]:
        """Waits for the chief's `("message", …)`, or for `("result", what each returned)`.

        Raises:
            What `ChildProcess.receive` raises, of the worker that failed first.
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
        except PeerLostError as follows:  # From what?
            self._raise_cause([other for other in waiting if other != index])
            raise follows

    def _raise_cause(self, others: Sequence[int]) -> None:
        """Raises what another worker failed of, if one did by itself."""
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
                except (PeerLostError, DeviceError):  # It has lost a peer, too, or is gone.
                    kind = "error"
                if kind != "message":
                    del connections[connection]


def _environment(cluster: Cluster, share: WorkerResources) -> dict[str, str]:
    """Returns the variables that tell a worker its cluster and its GPUs."""
    environment = {"TF_CONFIG": cluster.as_tf_config()}
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
    """Runs in a process of its own: `function`, on the cores of one worker."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # Whoever started us tells what there is to tell.
    limit_cores(share.cores)
    send = channel.send if index == 0 else lambda message: None
    return function(Channel(send, channel.receive), *arguments)
