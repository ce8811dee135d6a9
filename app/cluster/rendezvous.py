"""Connects the workers of a cluster and reports the missing workers while waiting."""

import contextlib
import json
import os
import re
import socket
import sys
import threading
import time
from collections.abc import Iterator, Sequence

from app.cluster import peer_proof
from app.cluster.environment import SECRET_VARIABLE, Cluster, host_and_port
from app.config import TrainConfig
from app.runtime import console, signals
from app.runtime.errors import ConfigError, PeerLostError, reason_of
from app.runtime.run_context import start_thread
from app.runtime.subprocesses import Subprocess, child_environment
from app.runtime.versions import versions
from strategies.collective_cluster import ClusterWorkers
from strategies.multi_worker import default_all_reduce

_SEC_BETWEEN_LINES = 10.0
_PROBE_SEC = 0.5
_PAUSE_SEC = 0.05
_MOST_CONNECTIONS = 64  # At the same time, without a proof yet.
_MOST_DROPPED_LINES = 10
# Names of the exceptions that TensorFlow raises in a worker whose peer is lost; names, so that
# TensorFlow is not imported for them.
_LOST = ("UnavailableError", "AbortedError", "DeadlineExceededError", "CancelledError")
# Fields that may differ between workers: paths and display.
_OWN = (
    *("out", "overwrite", "data_dir", "case"),
    *("verbosity", "start_timeout_sec", "stall_timeout_sec"),
)
# Fields of a case that must be equal: its text and the name of its function.
_OF_A_CASE = ("case_sha256", "model_fn")


def join(cluster: Cluster, local_devices: Sequence[str], config: TrainConfig) -> ClusterWorkers:
    """Connects this worker with the others; call it before TensorFlow runs any operation.

    Args:
        cluster: the workers.
        local_devices: devices of this worker.
        config: the same on every worker, except for paths and display.

    Raises:
        ConfigError: the port is in use, or workers have different flags, devices or versions.
        PeerLostError: a worker did not connect within `config.start_timeout_sec`, or was lost.
    """
    if cluster.is_chief:
        console.say(
            f"cluster of {console.count(len(cluster.addresses), 'worker')} from {cluster.source}:"
            f" {', '.join(cluster.addresses)}"
        )
    _meet(cluster, config.start_timeout_sec)
    auto = config.all_reduce == "auto"
    all_reduce = default_all_reduce(local_devices) if auto else config.all_reduce
    with naming_lost_peers(cluster), _ended_after(config.start_timeout_sec):
        workers = ClusterWorkers(cluster.addresses, cluster.index, local_devices, all_reduce)
    signals.reinstall()
    with naming_lost_peers(cluster):
        posted = workers.post(json.dumps(_settings(config, local_devices)))
        workers.post("read")  # Every worker has read the others' settings before any of them exits.
        _check_same(cluster, posted)
    return workers


def _meet(cluster: Cluster, timeout_sec: float) -> None:
    """Waits until this worker and every other one have proved to each other that they are workers.

    TensorFlow's own call would wait without a message or a timeout, and block the process. Only the
    first connected worker prints.

    Raises:
        ConfigError: the port of this worker is in use.
        PeerLostError: a worker does not connect in time.
    """
    start = time.monotonic()
    num_lines = 0
    # A worker leaves once it has reached all others and all have reached it: from then on
    # TensorFlow's server answers at its address.
    with _answering(cluster) as not_seen, _probing(cluster) as (not_reached, refused):
        while missing := not_reached | not_seen:
            waited_sec = time.monotonic() - start
            names = _names(cluster, sorted(missing))
            if waited_sec >= timeout_sec:
                raise PeerLostError(
                    f"--start_timeout_sec={timeout_sec}: timed out waiting for {names}"
                    + _advice(cluster, missing & refused)
                )
            if waited_sec >= (num_lines + 1) * _SEC_BETWEEN_LINES:
                num_lines += 1
                if all(index in missing for index in range(cluster.index)):
                    console.say(f"waiting for {names}, {waited_sec:.0f} s of {timeout_sec} s")
            time.sleep(_PROBE_SEC)


def _advice(cluster: Cluster, refused: set[int]) -> str:
    """Returns what to do about workers that did not come; `refused` did, with another secret."""
    if refused:
        return (
            f", as the process at {cluster.addresses[min(refused)]} does not know the secret of"
            f" this cluster; set the same {SECRET_VARIABLE} for every worker"
        )
    return "; check that it runs with the same list of addresses, then run the same command again"


@contextlib.contextmanager
def _answering(cluster: Cluster) -> Iterator[set[int]]:
    """Admits the other workers at this worker's address, and drops all other connections.

    Yields:
        The set of workers not admitted yet, which shrinks.

    Raises:
        ConfigError: another process listens there already; TensorFlow would share the port with it.
    """
    _, port = host_and_port(cluster.address)
    not_seen = {i for i in range(len(cluster.addresses)) if i != cluster.index}
    unproven: dict[socket.socket, None] = {}  # The oldest first.
    lock, ended = threading.Lock(), threading.Event()
    dropped: set[str] = set()

    def admit(connection: socket.socket, host: str) -> None:
        with connection:
            try:
                not_seen.discard(peer_proof.admit(connection, cluster.secret))
            except (OSError, peer_proof.StrangerError) as error:
                if host not in dropped and len(dropped) < _MOST_DROPPED_LINES:
                    dropped.add(host)
                    console.warn(f"dropped a connection from {host}: {error}")
            finally:
                with lock:
                    unproven.pop(connection, None)

    def make_room() -> None:
        """Drops the oldest connection: a worker needs milliseconds to prove itself."""
        with lock:
            oldest = next(iter(unproven))
            unproven.pop(oldest)
        with contextlib.suppress(OSError):  # The other side may have closed it.
            oldest.shutdown(socket.SHUT_RDWR)

    def accept(listener: socket.socket) -> None:
        while not ended.is_set():
            try:
                connection, (host, *_) = listener.accept()
            except OSError:  # No file descriptor is left, or the socket is shut down.
                ended.wait(_PAUSE_SEC)
                continue
            with lock:
                unproven[connection] = None
            if len(unproven) > _MOST_CONNECTIONS:
                make_room()
            start_thread(admit, connection, host.removeprefix("::ffff:"))

    with _listening(port, cluster.address) as listener:
        thread = start_thread(accept, listener)
        yield not_seen
        ended.set()
        with contextlib.suppress(OSError):
            listener.shutdown(socket.SHUT_RDWR)
        thread.join(2 * _PROBE_SEC)


@contextlib.contextmanager
def _listening(port: int, address: str) -> Iterator[socket.socket]:
    both = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both else socket.AF_INET
    with contextlib.ExitStack() as stack:
        try:
            listener = stack.enter_context(socket.socket(family, socket.SOCK_STREAM))
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if both:
                listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
            listener.bind(("", port))
            listener.listen()
        except OSError as error:
            raise ConfigError(
                f"port {port} of {address}: {reason_of(error)}; stop the process that uses the"
                " port, or give another port on every worker"
            ) from error
        yield listener


@contextlib.contextmanager
def _probing(cluster: Cluster) -> Iterator[tuple[set[int], set[int]]]:
    """Tries to reach every other worker, each in a separate thread.

    Yields:
        The set of workers not reached yet, which shrinks, and those at whose address a process
        without the secret answers. A slow name server delays only one worker.
    """
    not_reached = {i for i in range(len(cluster.addresses)) if i != cluster.index}
    refused: set[int] = set()
    ended = threading.Event()

    def probe(index: int) -> None:
        address = host_and_port(cluster.addresses[index])
        while not ended.is_set():
            with contextlib.suppress(OSError):
                try:
                    with socket.create_connection(address, timeout=_PROBE_SEC) as connection:
                        peer_proof.ask(connection, cluster.secret, cluster.index)
                    not_reached.discard(index)
                    return
                except peer_proof.StrangerError:
                    refused.add(index)
            ended.wait(_PROBE_SEC)

    for index in list(not_reached):
        start_thread(probe, index)
    try:
        yield not_reached, refused
    finally:
        ended.set()


_WATCHER = """
import os, signal, sys, time
time.sleep(float(sys.argv[2]))
sys.stderr.write(sys.argv[3])
sys.stderr.flush()
os.kill(int(sys.argv[1]), signal.SIGKILL)
"""


@contextlib.contextmanager
def _ended_after(timeout_sec: float) -> Iterator[None]:
    """Ends this process from outside if what it does takes too long.

    A worker that is lost just after it came leaves TensorFlow's call waiting, which holds Python's
    lock: no thread of ours could end it.
    """
    text = (
        f"error: --start_timeout_sec={timeout_sec}: a worker connected and was lost; run the same"
        " command again\n"
    )
    command = [sys.executable, "-IS", "-c", _WATCHER, str(os.getpid()), str(timeout_sec), text]
    watcher = Subprocess(command, child_environment(), is_silent=True)
    try:
        yield
    finally:
        watcher.end(grace_sec=0)


def _names(cluster: Cluster, indices: Sequence[int]) -> str:
    return ", ".join(f"worker {index} ({cluster.addresses[index]})" for index in indices)


def _settings(config: TrainConfig, local_devices: Sequence[str]) -> dict:
    """Returns the settings that must be equal on all workers."""
    flags = {f"--{name}": value for name, value in vars(config).items() if name not in _OWN}
    kind = "GPU" if "GPU" in local_devices[0] else "CPU"
    own = {f"version of {name}": version for name, version in versions().items()}
    fields = config.result_fields()
    case = {name: fields[name] for name in _OF_A_CASE if name in fields}
    return {**flags, **case, "devices": f"{len(local_devices)} {kind}", **own}


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
            f"workers differ ({'; '.join(differing[:3])}{more}); start all of them with the"
            " same flags, devices and versions"
        )


@contextlib.contextmanager
def naming_lost_peers(cluster: Cluster | None) -> Iterator[None]:
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
        f"worker {cluster.index} lost the connection to {who}; start all workers again with"
        " the same command to resume from the last checkpoint"
    )
