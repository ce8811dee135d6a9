"""The meeting of workers: those with the secret and equal settings meet, others are dropped."""

import concurrent.futures
import contextlib
import itertools
import re
import socket
import threading
import time

import pytest

from app.devices import rendezvous
from app.devices.cluster import Cluster, host_and_port
from app.devices.local_workers import free_ports
from app.devices.rendezvous import _MOST_STRANGERS, meet
from app.runtime.errors import ConfigError, PeerLostError

SECRET = "a secret of 16 or more"


def clusters(*secrets):
    addresses = tuple(f"127.0.0.1:{port}" for port in free_ports(len(secrets)))
    return [Cluster(addresses, index, secret=secret) for index, secret in enumerate(secrets)]


@pytest.fixture
def start():
    """A function that starts meetings in threads; returns futures."""
    with concurrent.futures.ThreadPoolExecutor() as pool:
        yield lambda members, settings=None, timeout_sec=20: [
            pool.submit(meet, member, (settings or {}).get(member.index, {}), timeout_sec)
            for member in members
        ]


def connect(address):
    """Connects as soon as there is a listener."""
    deadline = time.monotonic() + 10
    while True:
        with contextlib.suppress(ConnectionRefusedError):
            return socket.create_connection(address, timeout=5)
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_workers_without_a_secret_meet(start):
    assert [each.result(30) for each in start(clusters("", ""))] == [None] * 2


@pytest.mark.slow
def test_a_worker_that_comes_again_is_one_worker(start):
    chief, first, second = clusters(SECRET, SECRET, SECRET)
    (met,) = start([chief])
    (left,) = start([first], timeout_sec=1)  # It does not wait for the second one.
    with pytest.raises(PeerLostError, match="timed out waiting for workers, which worker 0 names"):
        left.result(20)
    (other,) = start([second])
    with pytest.raises(concurrent.futures.TimeoutError):
        met.result(1)
    (again,) = start([first])
    assert [each.result(20) for each in (met, again, other)] == [None] * 3


def test_all_workers_learn_who_is_missing(start, monkeypatch, capsys):
    monkeypatch.setattr(rendezvous, "_SEC_BETWEEN_LINES", 0.0)
    chief, first, second = clusters(SECRET, SECRET, SECRET)
    name = f"worker 2 ({second.addresses[2]})"
    for waiting in start([chief], timeout_sec=1) + start([first]):
        with pytest.raises(PeerLostError, match=f"for {re.escape(name)}; check"):
            waiting.result(30)
    assert re.search(rf"waiting for .*{re.escape(name)}, \d s of 1 s", capsys.readouterr().out)


def test_a_chief_that_answers_garbage_is_named(start):
    chief, worker = clusters(SECRET, SECRET)
    with socket.create_server(host_and_port(chief.addresses[0])) as server:

        def answer_all():
            with contextlib.suppress(OSError):
                for answer in itertools.cycle([b"HTTP/1.1 400\r\n\r\n", b"[1]\n"]):
                    connection, _ = server.accept()
                    connection.sendall(answer)

        threading.Thread(target=answer_all, daemon=True).start()
        (waiting,) = start([worker], timeout_sec=1)
        with pytest.raises(PeerLostError, match="--start_timeout_sec=1: timed out waiting for w"):
            waiting.result(30)
        server.shutdown(socket.SHUT_RDWR)


def test_a_chief_whose_name_does_not_resolve_is_named(start):
    (waiting,) = start([Cluster(("nowhere.invalid:2222", "127.0.0.1:2222"), 1)], timeout_sec=1)
    with pytest.raises(PeerLostError, match=r"worker 0 \(nowhere.invalid:2222\)"):
        waiting.result(30)


def test_settings_that_differ_are_named_on_every_worker(start):
    settings = {0: {"--seed": 0, "devices": "1 CPU"}, 1: {"--seed": 1, "devices": "1 CPU"}}
    for met in start(clusters(SECRET, SECRET), settings):
        with pytest.raises(ConfigError, match=r"--seed: worker 0 has 0, worker 1 has 1\)"):
            met.result(30)


def test_a_worker_with_another_secret_is_refused_at_once(start, capsys):
    chief, *others = clusters(SECRET, SECRET, "another secret of that")
    met, good, bad = start([chief, *others], timeout_sec=2)
    with pytest.raises(ConfigError, match="LOCKSTEP_SECRET is not that of worker 0"):
        bad.result(3)
    for each in met, good:
        with pytest.raises(PeerLostError, match="worker 2"):
            each.result(30)
    assert "dropped a connection from 127.0.0.1: it does not know" in capsys.readouterr().err


def test_a_port_in_use_is_named():
    (cluster,) = clusters(SECRET)
    with (
        socket.create_server(host_and_port(cluster.addresses[0])),
        pytest.raises(ConfigError, match=f"port .* of {cluster.addresses[0]}: Address already"),
    ):
        meet(cluster, {}, 1)


def test_the_oldest_of_too_many_silent_strangers_is_dropped(start, monkeypatch):
    monkeypatch.setattr(rendezvous, "_HELLO_SEC", 60)
    chief, worker = clusters(SECRET, SECRET)
    (met,) = start([chief])
    address = host_and_port(chief.addresses[0])
    with contextlib.ExitStack() as stack:
        oldest = stack.enter_context(connect(address))
        for _ in range(_MOST_STRANGERS):
            stack.enter_context(connect(address))
        with contextlib.suppress(ConnectionResetError):
            assert oldest.recv(1) == b""
        assert [each.result(30) for each in (*start([worker]), met)] == [None] * 2


def test_strangers_delay_nobody(start, capsys):
    garbage = [b"", b"GET / HTTP/1.1\r\n\r\n", bytes(range(256)) * 4096, b"[" * 60_000 + b"\n"]
    members = clusters(SECRET, SECRET, SECRET)
    address, ended = host_and_port(members[0].addresses[0]), threading.Event()

    def flood():
        kept, sent = [], itertools.cycle(garbage)
        while not ended.is_set():
            with contextlib.suppress(OSError):
                kept = [*kept[-2 * _MOST_STRANGERS :], socket.create_connection(address, timeout=1)]
                kept[-1].sendall(next(sent))

    (met,) = start(members[:1])
    connect(address).close()
    floods = [threading.Thread(target=flood) for _ in range(2)]
    for each in floods:
        each.start()
    try:
        time.sleep(0.5)
        for each in (*start(members[1:]), met):
            assert each.result(10) is None
    finally:
        ended.set()
        for each in floods:
            each.join(20)
    assert capsys.readouterr().err.count("dropped a connection from 127.0.0.1: ") == 1
