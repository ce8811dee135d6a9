"""Starts the workers of a training on this machine, and restarts all of them if one fails."""

import contextlib
import functools
import itertools
import multiprocessing.connection
import os
import pathlib
import random
import signal
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from app import console, signals
from app.children import Child, Program, output_of, start_program
from app.devices.cluster import Cluster
from app.errors import DeviceError, LockstepError, PeerLostError, Terminated
from app.options import Config

_MAX_RESTARTS, _RETRY_FROM = 3, 128  # Exit codes below are final.
# A worker that lost another one says so, or TensorFlow's native code aborts.
_FOLLOWS = (PeerLostError.exit_code, 128 + signal.SIGABRT)
_POLL_SEC = 0.1
_SETTLE_SEC = 2.0  # In which the original failure and its consequences are told apart.
_GRACE_SEC = 60.0  # For workers that were asked to stop: one call and a checkpoint.
_PORTS = range(10_240, 32_768)  # The kernel gives away higher ones itself.


class Share(NamedTuple):
    """The part of this machine that a worker uses."""

    cores: tuple[int, ...]
    gpus: str | None  # Value of CUDA_VISIBLE_DEVICES; None if no GPU is used.


def train_with_local_workers(config: Config, num_workers: int, path: pathlib.Path) -> None:
    """Trains in a run directory with several processes, and restarts all of them if one fails."""
    shares = split_machine(num_workers, config)
    workers = console.count(num_workers, "worker")
    console.say(f"{workers} on this machine, {console.count(len(shares[0].cores), 'core')} each")
    words, before = ["train", *config.flags(), f"--out={path}"], console.start_of_run(path)
    advice = "fix the error above and run the same command again"
    for number in range(_MAX_RESTARTS + 1):
        index, code = _run_all(words, shares)
        if not code:
            return
        failed = f"worker {index} ended with code {code}"
        if code < _RETRY_FROM:  # A retry cannot help.
            raise LockstepError(f"{failed}; {advice}", code)
        if console.start_of_run(path) != before:  # A restart must not remove what this one wrote.
            words = [word for word in words if not word.startswith("--overwrite")]
        if number < _MAX_RESTARTS:
            restart = f"restart {number + 1} of {_MAX_RESTARTS} of all workers"
            console.warn(f"{failed}: {restart} in {2**number} s")
            time.sleep(2**number)
    raise PeerLostError(f"{failed}, after {_MAX_RESTARTS} restarts; {advice} to resume")


def _run_all(words: Sequence[str], shares: Sequence[Share]) -> tuple[int, int]:
    """Runs all workers once; returns the one that failed, with its exit code, or (0, 0)."""
    # The terminal's signals reach this process only, which passes them on.
    start = functools.partial(start_program, words, start_new_session=True)
    with signals.deferred(), _started(shares, start) as workers:
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
    """Returns index and exit code of the worker whose failure made the others fail, or (0, 0)."""
    failed = [(index, code) for index, code in enumerate(codes) if code]
    if codes[0] == 0 or not failed:  # Worker 0 saves everything.
        return 0, 0
    return min(failed, key=lambda each: (each[1] in _FOLLOWS, each[1] >= _RETRY_FROM))


def _wait(workers: Sequence[Program], timeout_sec: float) -> None:
    deadline = time.monotonic() + timeout_sec
    while None in [worker.exit_code for worker in workers] and time.monotonic() < deadline:
        time.sleep(_POLL_SEC)


def call_on_workers(
    config: Config, function: Callable[..., Any], *args: Any, on_message: Callable[[Any], object]
) -> list[Any]:
    """Calls a function, as `Child` does, in several worker processes, and returns the results.

    Calls `on_message` with each message of worker 0. Raises as `Child.receive`, for the worker that
    failed first.
    """
    start = functools.partial(Child, function, *args, quiet=True)  # This process prints.
    results = dict[int, Any]()
    with _started(split_machine(config.num_workers or 1, config), start) as workers:
        waiting: dict[Any, int] = {worker.connection: i for i, worker in enumerate(workers)}
        while waiting:
            for connection in multiprocessing.connection.wait(list(waiting)):
                index = waiting[connection]
                try:
                    kind, value = workers[index].receive()
                except PeerLostError:  # Another one may have failed on its own.
                    del waiting[connection]
                    for other in multiprocessing.connection.wait(list(waiting), _SETTLE_SEC):
                        with contextlib.suppress(PeerLostError, DeviceError):
                            workers[waiting[other]].receive()
                    raise
                if kind == "result":
                    results[waiting.pop(connection)] = value
                elif index == 0:
                    on_message(value)
    return [results[index] for index in sorted(results)]


@contextlib.contextmanager
def _started(shares: Sequence[Share], start: Callable[..., Any]) -> Iterator[list[Any]]:
    """Starts a process for each worker of a new cluster, and ends all of them with the block."""
    ports = itertools.islice(_free_ports(), len(shares))
    addresses = tuple(f"127.0.0.1:{port}" for port in ports)
    with contextlib.ExitStack() as stack:
        processes = []
        for index, (cores, gpus) in enumerate(shares):
            environment = {"TF_CONFIG": Cluster(addresses, index).tf_config}
            if gpus is not None:
                environment["CUDA_VISIBLE_DEVICES"] = gpus
            processes.append(stack.enter_context(start(environment=environment, cores=cores)))
        yield processes


def _free_ports() -> Iterator[int]:
    """Yields ports that are free now."""
    for port in random.SystemRandom().sample(_PORTS, len(_PORTS)):
        with contextlib.suppress(OSError):
            socket.create_server(("", port)).close()
            yield port


def split_machine(num_workers: int, config: Config) -> list[Share]:
    """Returns what each worker uses: separate cores if there are enough, and GPUs."""
    cores = sorted(os.sched_getaffinity(0))
    size = max(1, len(cores) // num_workers)
    gpus = [] if config.distribution.device == "cpu" else _visible_gpus()
    each = config.distribution.num_gpus or max(1, len(gpus) // num_workers)
    if gpus and each * num_workers > len(gpus):
        raise DeviceError(
            f"--num_workers={num_workers} with {console.count(each, 'GPU')} each needs"
            f" {each * num_workers} GPUs, found {len(gpus)}; use fewer workers, or --device=cpu"
        )
    shares = []
    for index in range(num_workers):
        start = index * size % len(cores)
        own = ",".join(gpus[index * each : (index + 1) * each]) if gpus else None
        shares.append(Share(tuple(cores[start : start + size]), own))
    return shares


def _visible_gpus() -> list[str]:
    """Returns the names of the GPUs for CUDA_VISIBLE_DEVICES."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return [name for name in visible.split(",") if name not in ("", "-1")]
    with contextlib.suppress(OSError):
        code, text = output_of(["nvidia-smi", "--list-gpus"], timeout_sec=10)
        if not code:
            return [str(index) for index in range(len(text.strip().splitlines()))]
    return []
