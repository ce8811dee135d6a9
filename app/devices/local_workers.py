"""Starts the workers of a training on this machine, and restarts all of them if one fails."""

import contextlib
import functools
import multiprocessing.connection
import os
import pathlib
import random
import signal
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from subprocess import DEVNULL
from typing import Any, NamedTuple, Self, TypeVar

from app.devices.cluster import Cluster
from app.devices.gpus import query_driver
from app.options import Config
from app.runtime import console, signals
from app.runtime.errors import DeviceError, LockstepError, PeerLostError, Terminated
from app.runtime.processes import ChildProcess, Process, start_program

AnyProcess = TypeVar("AnyProcess", bound=Process)

RETRY_FROM = 128  # Lower exit codes are final.
# A worker that lost another one says so, or TensorFlow's native code aborts.
_FOLLOWS = (PeerLostError.exit_code, 128 + signal.SIGABRT)
_POLL_SEC = 0.1
_SETTLE_SEC = 2.0  # In which the original failure and its consequences are told apart.
_GRACE_SEC = 60.0  # For workers that were asked to stop: one call and a checkpoint.
_LONGEST_PAUSE_SEC = 30.0
_PORTS = range(10_240, 32_768)  # The kernel gives away higher ones itself.


class Resources(NamedTuple):
    """The part of this machine that a worker uses.

    Attributes:
        cores: numbers of processor cores.
        gpus: value of CUDA_VISIBLE_DEVICES; None if no GPU is used.
    """

    cores: tuple[int, ...]
    gpus: str | None


def train_with_local_workers(config: Config, num_workers: int, path: pathlib.Path) -> None:
    """Trains with `num_workers` processes of this program, and restarts all if one fails.

    Args:
        config: options of the training.
        num_workers: number of processes.
        path: run directory.

    Raises:
        DeviceError: there are fewer GPUs than the workers need.
        LockstepError: a worker failed with an error that a retry cannot fix.
        PeerLostError: workers failed more than `config.cluster.max_restarts` times.
    """
    shares = split_resources(num_workers, config)
    console.say(
        f"{console.count(num_workers, 'worker')} on this machine,"
        f" {console.count(len(shares[0].cores), 'core')} each"
    )
    words = ["train", *config.flags(), f"--out={path}"]
    number = 0
    while True:
        ports, before = free_ports(num_workers), console.start_of_run(path)
        index, code = _run_all(words, start_cluster(ports), shares)
        if (
            console.start_of_run(path) != before
        ):  # A restart must not overwrite what this one has written.
            words = [word for word in words if not word.startswith("--overwrite")]
        if not code:
            return
        if code == 2 and len(list(filter(_is_free, ports))) < num_workers:
            continue  # Another process took a port: choose others.
        if code < RETRY_FROM:
            raise LockstepError(
                f"worker {index} failed with exit code {code}; fix the error above and run the same"
                " command again",
                code,
            )
        number += 1
        failed = f"worker {index} ended with code {code}"
        if number > config.cluster.max_restarts:
            raise PeerLostError(
                f"{failed}, after {console.count(config.cluster.max_restarts, 'restart')}"
                " (--max_restarts);"
                " fix the error above and run the same command again to resume"
            )
        pause_sec = min(2.0 ** (number - 1), _LONGEST_PAUSE_SEC)
        console.warn(
            f"{failed}: restart {number} of {config.cluster.max_restarts} of all workers in"
            f" {pause_sec:g} s"
        )
        time.sleep(pause_sec)


def start_cluster(ports: Sequence[int]) -> list[Cluster]:
    """Returns a cluster on this machine, as each of its workers sees it."""
    addresses, secret = tuple(f"127.0.0.1:{port}" for port in ports), os.urandom(32).hex()
    return [Cluster(addresses, index, secret=secret) for index in range(len(ports))]


@contextlib.contextmanager
def _started(
    clusters: Sequence[Cluster], shares: Sequence[Resources], start: Callable[..., AnyProcess]
) -> Iterator[list[AnyProcess]]:
    """Starts a process for each worker, and ends all of them with the block.

    Args:
        clusters: the cluster as each worker sees it.
        shares: resources of each worker.
        start: starts a process with the options `environment` and `cores` of `Process`.
    """
    with contextlib.ExitStack() as stack:
        processes = list[AnyProcess]()
        for cluster, share in zip(clusters, shares, strict=True):
            gpus = {} if share.gpus is None else {"CUDA_VISIBLE_DEVICES": share.gpus}
            environment = cluster.as_environment() | gpus
            processes.append(start(environment=environment, cores=share.cores))
            stack.enter_context(processes[-1])
        yield processes


def _run_all(
    words: Sequence[str], clusters: Sequence[Cluster], shares: Sequence[Resources]
) -> tuple[int, int]:
    """Runs all workers once; returns the one that failed, with its exit code, or (0, 0).

    The kernel kills the workers if this process is killed. Each has a session of its own: signals
    of the terminal reach this process only, which passes them on.
    """
    start = functools.partial(start_program, words, start_new_session=True)
    with signals.deferred(), _started(clusters, shares, start) as workers:
        try:
            while not any(codes := [worker.exit_code for worker in workers]) and codes[0] is None:
                signals.check()
                time.sleep(_POLL_SEC)
            _wait(workers, _SETTLE_SEC if any(codes) else _GRACE_SEC)  # Worker 0 has saved all.
            return find_culprit([worker.exit_code for worker in workers])
        except (KeyboardInterrupt, Terminated):
            for worker in workers:
                worker.send_signal(signals.STOP_REQUEST)
            _wait(workers, _GRACE_SEC)
            raise


def find_culprit(codes: Sequence[int | None]) -> tuple[int, int]:
    """Returns index and exit code of the worker whose failure made the others fail.

    (0, 0) if worker 0, which saves everything, has finished.
    """
    failed = [(index, code) for index, code in enumerate(codes) if code]
    if codes[0] == 0 or not failed:
        return 0, 0

    def order(each: tuple[int, int]) -> tuple[bool, bool]:
        return each[1] in _FOLLOWS, each[1] >= RETRY_FROM

    return min(failed, key=order)


def _wait(workers: Sequence[Process], timeout_sec: float) -> None:
    deadline = time.monotonic() + timeout_sec
    while None in [worker.exit_code for worker in workers] and time.monotonic() < deadline:
        time.sleep(_POLL_SEC)


class WorkerGroup:
    """Runs several worker processes behind the interface of `ChildProcess`.

    Sends each message to all workers and receives only the chief's messages.

    Args:
        shares: resources of each worker.
        function: see `ChildProcess`; it reads its cluster from the environment.
        *arguments: further arguments of the function.
    """

    def __init__(self, shares: Sequence[Resources], function: Callable[..., Any], *arguments: Any):
        # The parent process prints.
        start = functools.partial(ChildProcess, function, *arguments, stdout=DEVNULL)
        self._processes = _started(start_cluster(free_ports(len(shares))), shares, start)
        self._results: dict[int, object] = {}

    def __enter__(self) -> Self:
        self._workers = self._processes.__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        self._processes.__exit__(*exception)

    def send(self, message: Any) -> None:
        """Sends a message to all workers."""
        for worker in self._workers:
            worker.send(message)

    def receive(self) -> tuple[str, Any]:
        """Waits for the chief's `("message", …)`, or for `("result", results of all workers)`.

        Raises:
            The exception of the worker that failed first, as `ChildProcess.receive` raises it.
        """
        while len(self._results) < len(self._workers):
            for index in self._ready(None):
                try:
                    kind, value = self._workers[index].receive()
                except PeerLostError:
                    self._raise_cause(index)
                    raise
                if kind == "result":
                    self._results[index] = value
                elif index == 0:
                    return kind, value
        return "result", [self._results[index] for index in range(len(self._workers))]

    def _ready(self, timeout_sec: float | None) -> list[int]:
        """Waits for workers without a result; returns those that have sent something."""
        waiting = {w.connection: i for i, w in enumerate(self._workers) if i not in self._results}
        ready = multiprocessing.connection.wait(list(waiting), timeout_sec)
        return [index for connection, index in waiting.items() if connection in ready]

    def _raise_cause(self, index: int) -> None:
        """Raises the exception of a worker that failed on its own, not as another was lost."""
        self._results[index] = None
        for other in self._ready(_SETTLE_SEC):
            with contextlib.suppress(PeerLostError, DeviceError):
                self._workers[other].receive()


def split_resources(num_workers: int, options: Config) -> list[Resources]:
    """Returns the resources of each worker: separate cores if there are enough, and GPUs.

    Args:
        num_workers: number of workers.
        options: the devices of each worker.

    Raises:
        DeviceError: there are fewer GPUs than the workers need.
    """
    cores = sorted(os.sched_getaffinity(0))
    size = max(1, len(cores) // num_workers)
    starts = [index * size % len(cores) for index in range(num_workers)]
    gpus = [] if options.distribution.device == "cpu" else _visible_gpus()
    each = options.num_devices_asked or max(1, len(gpus) // num_workers)
    if gpus and each * num_workers > len(gpus):
        raise DeviceError(
            f"--num_workers={num_workers} with {console.count(each, 'GPU')} each needs"
            f" {each * num_workers} GPUs, found {len(gpus)}; use fewer workers, or --device=cpu"
        )
    return [
        Resources(
            tuple(cores[start : start + size]),
            ",".join(gpus[index * each : (index + 1) * each]) if gpus else None,
        )
        for index, start in enumerate(starts)
    ]


def _visible_gpus() -> list[str]:
    """Returns the names of the GPUs for CUDA_VISIBLE_DEVICES."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return [name for name in visible.split(",") if name not in ("", "-1")]
    return [str(index) for index, _ in enumerate(query_driver()[0])]


def free_ports(count: int) -> list[int]:
    """Returns ports that are free now."""
    candidates = random.SystemRandom().sample(_PORTS, len(_PORTS))
    return [port for port in candidates[: 50 * count] if _is_free(port)][:count]


def _is_free(port: int) -> bool:
    try:
        socket.create_server(("", port)).close()
    except OSError:
        return False
    return True
