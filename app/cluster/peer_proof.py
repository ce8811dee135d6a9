"""Admits to the rendezvous only processes that know the secret of the cluster.

Both sides prove that they know it, and neither sends it: each returns the HMAC of random bytes that
the other side chose (a challenge and its response). Every read has a size limit and a deadline.

Without a secret the key is empty: that keeps out port scanners, not people.

Reference: HMAC, RFC 2104.
"""

import hmac
import secrets
import socket
import time

_GREETING = b"lockstep rendezvous 1\n"
_CHALLENGE_BYTES, _INDEX_BYTES = 32, 4
_DIGEST = "sha256"
_DIGEST_BYTES = 32
_ADMITTED, _SEEN = b"\x01", b"\x02"
_DEADLINE_SEC = 3.0
_LONGEST_PARTITION_SEC = 120.0


class StrangerError(Exception):
    """The process at the other end of a connection is not a worker of this cluster."""


def admit(connection: socket.socket, secret: bytes) -> int:
    """Answers a process that connected to this worker.

    Args:
        connection: accepted; the caller closes it.
        secret: of the cluster.

    Returns:
        The index of the worker that connected.

    Raises:
        OSError: the connection was lost, or too slow.
        StrangerError: the process is not a worker of this cluster.
    """
    deadline = time.monotonic() + _DEADLINE_SEC
    if _receive(connection, len(_GREETING), deadline) != _GREETING:
        raise StrangerError("not a worker of this program")
    theirs = _receive(connection, _CHALLENGE_BYTES + _INDEX_BYTES, deadline)
    ours = secrets.token_bytes(_CHALLENGE_BYTES)
    connection.sendall(ours + _respond(secret, b"admits", theirs, ours))
    response = _receive(connection, _DIGEST_BYTES, deadline)
    if not hmac.compare_digest(response, _respond(secret, b"asks", ours, theirs)):
        raise StrangerError("it does not know the secret of the cluster")
    connection.sendall(_ADMITTED)
    return int.from_bytes(theirs[_CHALLENGE_BYTES:])


def wait_until_seen(connection: socket.socket) -> None:
    """Waits until an admitted worker knows that it is admitted.

    Without that knowledge it would connect again, to a worker that answers no more. TCP repeats
    what a network loses, so that this takes as long as the network is cut.

    Raises:
        OSError: it has ended, or has connected again.
    """
    _receive(connection, len(_SEEN), time.monotonic() + _LONGEST_PARTITION_SEC)


def ask(connection: socket.socket, secret: bytes, index: int) -> None:
    """Asks another worker for admission, and checks that it is one.

    Args:
        connection: to the other worker; the caller closes it.
        secret: of the cluster.
        index: of this worker.

    Raises:
        OSError: the connection was lost, or too slow.
        StrangerError: the other process is not a worker of this cluster.
    """
    deadline = time.monotonic() + _DEADLINE_SEC
    ours = secrets.token_bytes(_CHALLENGE_BYTES) + index.to_bytes(_INDEX_BYTES)
    connection.settimeout(_DEADLINE_SEC)
    connection.sendall(_GREETING + ours)
    theirs = _receive(connection, _CHALLENGE_BYTES, deadline)
    response = _receive(connection, _DIGEST_BYTES, deadline)
    if not hmac.compare_digest(response, _respond(secret, b"admits", ours, theirs)):
        raise StrangerError("it does not know the secret of the cluster")
    connection.sendall(_respond(secret, b"asks", theirs, ours))
    if _receive(connection, len(_ADMITTED), deadline) != _ADMITTED:
        raise StrangerError("it does not admit this worker")
    connection.sendall(_SEEN)


def _respond(secret: bytes, role: bytes, challenge: bytes, own: bytes) -> bytes:
    """Returns the response to a challenge; the role keeps it from being sent back as the other."""
    return hmac.digest(secret, b"\n".join((_GREETING, role, challenge, own)), _DIGEST)


def _receive(connection: socket.socket, num_bytes: int, deadline: float) -> bytes:
    """Returns exactly so many bytes.

    Raises:
        OSError: fewer came in time, or the connection was closed.
    """
    parts = b""
    while len(parts) < num_bytes:
        remaining_sec = deadline - time.monotonic()
        if remaining_sec <= 0:
            raise TimeoutError("too slow")
        connection.settimeout(remaining_sec)
        part = connection.recv(num_bytes - len(parts))
        if not part:
            raise ConnectionError("closed by the other side")
        parts += part
    return parts
