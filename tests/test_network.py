"""The networks of `make network-faults`: namespaces with slow links."""

import subprocess
import sys

import pytest

import network
import network_faults
from network import Link, Network

_REASON = network.unavailable()
pytestmark = pytest.mark.skipif(bool(_REASON), reason=_REASON or "available")
_SERVER = """
import socket
server = socket.create_server(("0.0.0.0", 5000))
print("listens", flush=True)
while True:
    connection, _ = server.accept()
    while data := connection.recv(1 << 16):
        connection.sendall(data[-1:])
"""
_CLIENT = """
import socket, sys, time
connection = socket.create_connection((sys.argv[1], 5000), timeout=1)
start = time.monotonic()
connection.sendall(bytes(int(sys.argv[2])))
connection.recv(1)
print(time.monotonic() - start)
"""


def seconds(link, num_bytes=1, cut=()):
    """Returns how long it takes to send bytes and to receive the first answer."""
    with Network(2, link) as net:
        server = subprocess.Popen(
            net.command(1, sys.executable, "-c", _SERVER), stdout=subprocess.PIPE, text=True
        )
        try:
            assert server.stdout.readline() == "listens\n"
            net.cut(*cut)
            command = net.command(0, sys.executable, "-c", _CLIENT, net.address(1), str(num_bytes))
            result = subprocess.run(command, capture_output=True, text=True)
        finally:
            server.kill()
            server.wait()
            server.stdout.close()
    return float(result.stdout) if result.returncode == 0 else None


def test_a_link_delays_and_a_cut_link_carries_nothing():
    assert seconds(Link(latency_sec=0.1)) >= 0.2
    assert seconds(Link(latency_sec=0.1)) < 0.2 + 5  # Whatever else runs on this machine.
    for cut in [(0, 1)], [(1, 0)]:
        assert seconds(Link(), cut=cut) is None


def test_a_network_leaves_nothing_behind():
    def namespaces():
        return subprocess.run(["ip", "netns"], capture_output=True, text=True).stdout

    before = namespaces()
    with Network(3):
        assert namespaces() != before
    assert namespaces() == before


@pytest.mark.slow
def test_a_training_survives_a_lossy_network(tmp_path):
    cluster = network_faults.Cluster(tmp_path)
    seen = network_faults.try_fault(cluster, "loss 1 %")
    assert seen.codes == [0, 0] and seen.line.startswith("test acc")
