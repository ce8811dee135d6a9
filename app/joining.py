"""Brings the workers of a cluster together, and says who is missing while it waits."""

import contextlib
import json
import re
import socket
import threading
import time
from collections.abc import Iterator, Sequence

from app import console
from app.cluster import Cluster, host_and_port
from app.config import Config
from app.errors import ConfigError, PeerLostError, reason_of
from app.versions import versions
from strategies.cluster import ClusterWorkers

_SEC_BETWEEN_LINES = 10.0
_PROBE_SEC = 1.0
# What TensorFlow raises in a worker whose peer is gone, killed or frozen; by name, so that
# TensorFlow is not imported for this.
_LOST = ("UnavailableError", "AbortedError", "DeadlineExceededError", "CancelledError")
# What may differ between workers: where each finds and leaves things.
_OWN = ("out", "overwrite", "data_dir", "verbosity", "start_timeout_sec", "stall_timeout_sec")


def join(cluster: Cluster, local_devices: Sequence[str], config: Config) -> ClusterWorkers:
    """Connects this worker with the others; called before TensorFlow computes anything.

    Args:
        cluster: who belongs to it.
        local_devices: of this worker.
        config: the same on each of them, but for paths and display.

    Raises:
        ConfigError: the port is in use, or workers have different flags, devices or versions.
        PeerLostError: a worker was lost meanwhile. One that does not come within
            `config.start_timeout_sec` ends the process with that error's exit code.
    """
    _check_port(cluster.address)
    if cluster.is_chief:
        console.say(
            f"cluster of {console.count(len(cluster.addresses), 'worker')} from {cluster.source}:"
            f" {', '.join(cluster.addresses)}"
        )
    all_reduce = config.all_reduce
    if all_reduce == "auto":
        all_reduce = "nccl" if "GPU" in local_devices[0] else "ring"
    with telling_of_peers(cluster), _told_who_is_missing(cluster, config.start_timeout_sec):
        workers = ClusterWorkers(cluster.addresses, cluster.index, local_devices, all_reduce)
    with telling_of_peers(cluster):
        _check_same(cluster, workers.post(json.dumps(_settings(config, local_devices))))
    return workers


def _check_port(address: str) -> None:
    """Refuses a port that somebody listens at: TensorFlow would share it, and both hear half."""
    host, port = host_and_port(address)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_STREAM) as listener:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(("", port))
            listener.listen()
    except OSError as error:
        raise ConfigError(
            f"port {port} of {address}: {reason_of(error)} — a free port is required for this"
            " worker; end what uses it, or name another port on every worker"
        ) from error


@contextlib.contextmanager
def _told_who_is_missing(cluster: Cluster, timeout_sec: float) -> Iterator[None]:
    """Watches the wait for other workers in a thread: TensorFlow's own call says nothing.

    One worker speaks: the first of those that are there.
    """
    came = threading.Event()

    def watch():
        start = last_line = time.monotonic()
        while not came.wait(0.2):
            now = time.monotonic()
            if now - start >= timeout_sec:
                missing = _missing(cluster)
                if not came.is_set():
                    console.report_error(_did_not_come(cluster, missing, timeout_sec))
                    console.leave(PeerLostError.exit_code)
            if now - last_line >= _SEC_BETWEEN_LINES:
                last_line += _SEC_BETWEEN_LINES
                missing = _missing(cluster)
                speaks = all(index in missing for index in range(cluster.index))
                if speaks and missing and not came.is_set():
                    console.say(
                        f"waiting for {_names(cluster, missing)}, {now - start:.0f} s of"
                        f" {timeout_sec} s"
                    )

    thread = threading.Thread(target=watch, daemon=True, name="missing workers")
    thread.start()
    try:
        yield
    finally:
        came.set()
        thread.join()


def _missing(cluster: Cluster) -> list[int]:
    """Returns the workers at whose address nobody answers."""
    others = [i for i in range(len(cluster.addresses)) if i != cluster.index]
    answers = {}

    def probe(index):
        with contextlib.suppress(OSError):
            address = host_and_port(cluster.addresses[index])
            socket.create_connection(address, timeout=_PROBE_SEC).close()
            answers[index] = True

    threads = [threading.Thread(target=probe, args=(index,), daemon=True) for index in others]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * _PROBE_SEC)
    return [index for index in others if index not in answers]


def _did_not_come(cluster: Cluster, missing: list[int], timeout_sec: float) -> PeerLostError:
    who = f"{_names(cluster, missing)} did not come" if missing else "all answer, but do not join"
    return PeerLostError(
        f"--start_timeout_sec={timeout_sec}: {who} — every worker is required, with the same list"
        " of addresses; start it and run the same command again"
    )


def _names(cluster: Cluster, indices: Sequence[int]) -> str:
    return ", ".join(f"worker {index} ({cluster.addresses[index]})" for index in indices)


def _settings(config: Config, local_devices: Sequence[str]) -> dict:
    """Returns what has to be the same everywhere."""
    flags = {f"--{name}": value for name, value in vars(config).items() if name not in _OWN}
    kind = "GPU" if "GPU" in local_devices[0] else "CPU"
    own = {f"version of {name}": version for name, version in versions().items()}
    return {**flags, "devices": f"{len(local_devices)} {kind}", **own}


def _check_same(cluster: Cluster, posted: Sequence[str]) -> None:
    """Refuses workers that would not make the same steps.

    Raises:
        ConfigError: some have other flags, devices or versions than the chief.
    """
    chief, *others = (json.loads(text) for text in posted)
    differing = [
        f"{name}: worker 0 has {chief.get(name)}, worker {index} has {other.get(name)}"
        for index, other in enumerate(others, start=1)
        for name in {**chief, **other}
        if chief.get(name) != other.get(name)
    ]
    if differing:
        more = f" and {len(differing) - 3} more" if len(differing) > 3 else ""
        raise ConfigError(
            f"workers differ ({'; '.join(differing[:3])}{more}) — the same flags, devices and"
            " versions are required on every worker; start all of them with one command"
        )


@contextlib.contextmanager
def telling_of_peers(cluster: Cluster | None) -> Iterator[None]:
    """Turns what TensorFlow raises when a worker is gone into one line that names it.

    Raises:
        PeerLostError: it is.
    """
    try:
        yield
    except Exception as error:
        if cluster is None or type(error).__name__ not in _LOST:
            raise
        raise _lost(cluster, str(error)) from error


def _lost(cluster: Cluster, text: str) -> PeerLostError:
    tasks = {int(task) for task in re.findall(r"/task:([0-9]+)", text)} - {cluster.index}
    known = sorted(task for task in tasks if task < len(cluster.addresses))
    who = _names(cluster, known) if known else "a worker"
    return PeerLostError(
        f"worker {cluster.index} has lost {who} — every worker is required in every step; start all"
        " of them again with the same command: it goes on from the last checkpoint"
    )
