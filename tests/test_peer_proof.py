"""The rendezvous: workers that know the secret meet, and everything else is dropped."""

import contextlib
import os
import socket
import threading
import time

import pytest

from app.cluster import meeting, peer_proof
from app.cluster.environment import (
    Cluster,
    find_cluster,
    find_secret,
    host_and_port,
    new_secret,
)
from app.cluster.resource_split import find_free_ports
from app.runtime.errors import ConfigError, PeerLostError

SECRET, OTHER = b"a secret of 16 or more", b"another secret of that"


@pytest.fixture
def pair():
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield ours, theirs


def in_thread(function, *arguments):
    """Starts a function; returns another one that waits for its result or exception."""
    outcome = []

    def run():
        try:
            outcome.append(function(*arguments))
        except (OSError, PeerLostError, peer_proof.StrangerError) as error:
            outcome.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()

    def wait():
        thread.join(20)
        return outcome[0]

    return wait


@pytest.mark.parametrize("secret", [SECRET, b""])
def test_workers_with_the_same_secret_admit_each_other(pair, secret):
    admitted = in_thread(peer_proof.admit, pair[0], secret)
    peer_proof.ask(pair[1], secret, 300)
    assert admitted() == 300


@pytest.mark.parametrize(("ours", "theirs"), [(SECRET, OTHER), (SECRET, b""), (b"", SECRET)])
def test_another_secret_is_noticed_on_both_sides(pair, ours, theirs):
    admitted = in_thread(peer_proof.admit, pair[0], ours)
    with pytest.raises(peer_proof.StrangerError, match="does not know the secret"):
        peer_proof.ask(pair[1], theirs, 1)
    pair[1].close()
    assert isinstance(admitted(), OSError | peer_proof.StrangerError)


def test_a_worker_that_does_not_know_that_it_is_admitted_connects_again(pair):
    """The network lost the last message: this worker must keep answering."""

    def admit():
        peer_proof.admit(pair[0], SECRET)
        peer_proof.wait_until_seen(pair[0])

    admitted = in_thread(admit)
    with pytest.raises(OSError):
        peer_proof.ask(Deaf(pair[1]), SECRET, 1)
    pair[1].close()
    assert isinstance(admitted(), OSError)


class Deaf:
    """A connection that is lost before the last byte is received."""

    def __init__(self, connection):
        self._connection = connection

    def recv(self, num_bytes):
        if num_bytes == len(peer_proof._ADMITTED):
            raise TimeoutError
        return self._connection.recv(num_bytes)

    def __getattr__(self, name):
        return getattr(self._connection, name)


def test_a_worker_that_has_joined_is_not_reported_as_a_stranger(capsys):
    """TensorFlow of a worker that has met all others connects where others still wait."""
    first, second, _ = clusters(SECRET, SECRET, SECRET)
    met = in_thread(meeting.meet, first, 3)
    deadline = time.monotonic() + 3
    while True:  # Until it listens.
        with contextlib.suppress(OSError):
            with socket.create_connection(host_and_port(first.address)) as connection:
                peer_proof.ask(connection, SECRET, second.index)
            break
        assert time.monotonic() < deadline
    with socket.create_connection(host_and_port(first.address)) as connection:
        connection.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")
        with contextlib.suppress(ConnectionResetError):
            assert connection.recv(1) == b""
    assert isinstance(met(), PeerLostError)
    assert "dropped" not in capsys.readouterr().err


@pytest.mark.parametrize("sent", [b"", b"GET / HTTP/1.1\r\n\r\n", os.urandom(4096), b"lockstep"])
def test_whatever_else_is_sent_is_refused(pair, sent):
    admitted = in_thread(peer_proof.admit, pair[0], SECRET)
    with contextlib.suppress(OSError):
        pair[1].sendall(sent)
    pair[1].close()
    assert isinstance(admitted(), OSError | peer_proof.StrangerError)


def test_the_response_of_a_worker_is_no_proof_for_a_stranger(pair):
    """A stranger that sends back what it received, as it does not know the secret."""
    admitted = in_thread(peer_proof.admit, pair[0], SECRET)
    pair[1].sendall(peer_proof._GREETING + bytes(peer_proof._CHALLENGE_BYTES + 4))
    received = peer_proof._receive(pair[1], 64, time.monotonic() + 5)
    pair[1].sendall(received[32:])
    assert isinstance(admitted(), peer_proof.StrangerError)


def test_who_is_too_slow_is_dropped(pair, monkeypatch):
    monkeypatch.setattr(peer_proof, "_DEADLINE_SEC", 0.2)
    admitted = in_thread(peer_proof.admit, pair[0], SECRET)
    for byte in peer_proof._GREETING[:5]:  # A byte at a time extends no deadline.
        pair[1].sendall(bytes([byte]))
        time.sleep(0.1)
    assert isinstance(admitted(), TimeoutError)


def clusters(*secrets):
    addresses = tuple(f"127.0.0.1:{port}" for port in find_free_ports(len(secrets)))
    return [Cluster(addresses, index, secret=secret) for index, secret in enumerate(secrets)]


def test_workers_meet_although_strangers_keep_connecting(capsys):
    first, *others = clusters(*[SECRET] * 3)
    address = host_and_port(first.address)
    met = in_thread(meeting.meet, first, 20)
    with contextlib.ExitStack() as stack:
        idle = []
        while len(idle) < 3 * meeting._MOST_CONNECTIONS:  # They connect and say nothing.
            with contextlib.suppress(ConnectionRefusedError):
                idle.append(stack.enter_context(socket.create_connection(address, timeout=5)))
        stranger = stack.enter_context(socket.create_connection(address, timeout=5))
        stranger.sendall(b"GET / HTTP/1.1\r\n" * 4)
        start = time.monotonic()
        for wait in [in_thread(meeting.meet, cluster, 20) for cluster in others]:
            assert wait() is None
        assert met() is None
        assert time.monotonic() - start < 10
    told = capsys.readouterr().err
    assert told.count("dropped a connection from 127.0.0.1: ") == 1  # Once for each host.


def test_thousands_of_connections_keep_no_worker_out():
    first, second = clusters(SECRET, SECRET)
    address = host_and_port(first.address)
    ended = threading.Event()

    def flood():
        count = 0
        while not ended.is_set():
            with contextlib.suppress(OSError):
                with socket.create_connection(address, timeout=1) as connection:
                    connection.sendall(peer_proof._GREETING)
                count += 1
        return count

    met = in_thread(meeting.meet, first, 20)
    floods = [in_thread(flood) for _ in range(2)]
    time.sleep(1)
    start = time.monotonic()
    assert meeting.meet(second, 20) is None and met() is None
    assert time.monotonic() - start < 10
    ended.set()
    assert sum(wait() for wait in floods) > 100


def test_a_worker_with_another_secret_does_not_join():
    waits = [in_thread(meeting.meet, cluster, 3) for cluster in clusters(SECRET, OTHER)]
    for wait in waits:
        error = wait()
        assert isinstance(error, PeerLostError)
        assert "does not know the secret" in str(error) and "LOCKSTEP_SECRET" in str(error)
    names = {thread.name for thread in threading.enumerate()}
    assert not any("accept" in name for name in names)  # It ends with the meeting.


def test_the_secret_comes_from_a_variable_or_a_file(tmp_path):
    path = tmp_path / "secret"
    path.write_bytes(SECRET + b"\n")
    assert find_secret({"LOCKSTEP_SECRET": SECRET.decode()}) == SECRET
    assert find_secret({"LOCKSTEP_SECRET_FILE": str(path)}) == SECRET
    (tmp_path / "link").symlink_to(path)  # As Kubernetes mounts it.
    assert find_secret({"LOCKSTEP_SECRET_FILE": str(tmp_path / "link")}) == SECRET
    assert find_secret({}) == b""
    assert len(new_secret()) == 64 and new_secret() != new_secret()


@pytest.mark.parametrize(
    ("environ", "told"),
    [
        ({"LOCKSTEP_SECRET": "short"}, "LOCKSTEP_SECRET must have 16 to 4096 characters, got 5"),
        ({"LOCKSTEP_SECRET": "x" * 5000}, "got 5000"),
        ({"LOCKSTEP_SECRET_FILE": "/nowhere/secret"}, "LOCKSTEP_SECRET_FILE=/nowhere/secret: "),
        ({"LOCKSTEP_SECRET_FILE": "/dev/zero"}, "LOCKSTEP_SECRET_FILE=/dev/zero: "),
    ],
)
def test_a_secret_that_cannot_be_used_is_refused(environ, told):
    with pytest.raises(ConfigError) as refused:
        find_secret(environ)
    assert told in str(refused.value)


def test_the_secret_travels_in_the_environment_and_nowhere_else():
    (cluster,) = clusters(SECRET)
    assert find_cluster(cluster.as_environment()).secret == SECRET
    assert SECRET.decode() not in cluster.as_tf_config() and "secret of" not in repr(cluster)
