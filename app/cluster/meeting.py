"""Lets the workers of a cluster find each other, and reports the missing ones while waiting."""

import contextlib
import socket
import threading
import time
from collections.abc import Iterator, Sequence

from app.cluster import peer_proof
from app.cluster.environment import SECRET_VARIABLE, Cluster, host_and_port
from app.runtime import console
from app.runtime.errors import ConfigError, PeerLostError, reason_of
from app.runtime.run_context import start_thread

_SEC_BETWEEN_LINES = 10.0
_PROBE_SEC = 0.5
_PAUSE_SEC = 0.05
_MOST_CONNECTIONS = 64  # At the same time, without a proof yet.
_MOST_DROPPED_LINES = 10


def meet(cluster: Cluster, timeout_sec: float) -> None:
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
            names = names_of(cluster, sorted(missing))
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
    with _listening(port, cluster.address) as listener:
        admission = _Admission(cluster, listener)
        thread = start_thread(admission.accept)
        try:
            yield admission.not_seen
        finally:  # Also after a timeout: else the thread would retry on the closed socket.
            admission.ended.set()
            with contextlib.suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)
            thread.join(2 * _PROBE_SEC)


class _Admission:
    """Accepts connections, each in a separate thread, and admits workers.

    Args:
        cluster: the workers.
        listener: of this worker.

    Attributes:
        not_seen: workers that are not admitted yet.
        ended: set when no more connections are accepted.
    """

    def __init__(self, cluster: Cluster, listener: socket.socket) -> None:
        self._secret, self._listener = cluster.secret, listener
        self._unproven: dict[socket.socket, None] = {}  # The oldest first.
        self._lock = threading.Lock()
        self._known: set[str] = set()  # Hosts that are admitted, or dropped and reported.
        self._num_lines = 0
        self.not_seen = {i for i in range(len(cluster.addresses)) if i != cluster.index}
        self.ended = threading.Event()

    def accept(self) -> None:
        """Accepts connections until `ended` is set."""
        while not self.ended.is_set():
            try:
                connection, (host, *_) = self._listener.accept()
            except OSError:  # No file descriptor is left, or the socket is shut down.
                self.ended.wait(_PAUSE_SEC)
                continue
            self._make_room_for(connection)
            start_thread(self._admit, connection, host.removeprefix("::ffff:"))

    def _make_room_for(self, connection: socket.socket) -> None:
        """Drops the oldest connection of too many: a worker needs milliseconds to prove itself."""
        with self._lock:
            self._unproven[connection] = None
            if len(self._unproven) <= _MOST_CONNECTIONS:
                return
            oldest = next(iter(self._unproven))
            self._unproven.pop(oldest)
        with contextlib.suppress(OSError):  # The other side may have closed it.
            oldest.shutdown(socket.SHUT_RDWR)

    def _admit(self, connection: socket.socket, host: str) -> None:
        with connection:
            try:
                index = peer_proof.admit(connection, self._secret)
            except (OSError, peer_proof.StrangerError) as error:
                if host not in self._known and self._num_lines < _MOST_DROPPED_LINES:
                    self._known.add(host)
                    self._num_lines += 1
                    console.warn(f"dropped a connection from {host}: {error}")
                return
            finally:
                with self._lock:
                    self._unproven.pop(connection, None)
            self._known.add(host)  # Its TensorFlow may connect before all workers have met.
            with contextlib.suppress(OSError):  # It connects again.
                peer_proof.wait_until_seen(connection)
                self.not_seen.discard(index)


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


def names_of(cluster: Cluster, indices: Sequence[int]) -> str:
    """Returns workers with their addresses, for messages."""
    return ", ".join(f"worker {index} ({cluster.addresses[index]})" for index in indices)
