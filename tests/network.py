"""A network of hosts on this machine, whose links have latency, loss and limited bandwidth.

Each host is a network namespace with a TUN device. A thread forwards the packets between the
devices, so that TCP sees what a real link would do to them: queues, retransmissions, partitions.
Needs root and `/dev/net/tun` (Linux).
"""

import contextlib
import ctypes
import dataclasses
import fcntl
import heapq
import itertools
import os
import pathlib
import random
import select
import struct
import subprocess
import threading
import time
from typing import Self

_TUNSETIFF, _IFF_TUN, _IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
_CLONE_NEWNET = 0x40000000
_MTU = 9000  # Jumbo frames: fewer packets to forward.
_QUEUE_SEC = 0.5  # Packets that would wait longer for their turn are dropped, as a router does.
_ADDRESS = "10.98.0.{}"
_NUMBERS = itertools.count()


@dataclasses.dataclass(frozen=True)
class Link:
    """What the link of every host does to the packets that the host sends.

    Attributes:
        latency_sec: delay in one direction.
        loss: fraction of packets that are lost.
        bits_per_sec: bandwidth in one direction.
    """

    latency_sec: float = 0.0
    loss: float = 0.0
    bits_per_sec: float = 1e9


def unavailable() -> str:
    """Returns why this machine cannot have such a network; empty if it can."""
    if os.geteuid():
        return "network namespaces need root"
    try:
        with Network(1):
            return ""
    except (OSError, subprocess.CalledProcessError) as error:
        return f"no network namespace with a TUN device: {error}"


class Network:
    """Hosts in namespaces; a context manager, which removes them at the end.

    Args:
        num_hosts: number of hosts.
        link: of every host; may be replaced while the network is in use.
        seed: seed of the losses.
        mtu: largest packet, in bytes.

    Attributes:
        link: current properties of all links.
        num_bytes: bytes forwarded so far.
    """

    def __init__(self, num_hosts: int, link: Link | None = None, *, seed: int = 0, mtu: int = _MTU):
        self.link, self.num_bytes = link or Link(), 0
        self._num_hosts, self._mtu, self._random = num_hosts, mtu, random.Random(seed)
        prefix = f"ls{os.getpid()}-{next(_NUMBERS)}"
        self._names = [f"{prefix}-{host}" for host in range(num_hosts)]
        self._cut: set[tuple[int, int]] = set()
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Self:
        with self._stack:
            self._devices = [self._create(host) for host in range(self._num_hosts)]
            read, write = os.pipe()
            thread = threading.Thread(target=self._forward, args=(read,), daemon=True)
            thread.start()
            self._stack.callback(os.close, read)
            self._stack.callback(thread.join)
            self._stack.callback(os.close, write)
            self._stack = self._stack.pop_all()
        return self

    def __exit__(self, *exception: object) -> None:
        self._stack.close()

    def address(self, host: int) -> str:
        """Returns the IP address of a host."""
        return _ADDRESS.format(host + 1)

    def command(self, host: int, *command: str) -> list[str]:
        """Returns the command that runs `command` on a host."""
        return ["ip", "netns", "exec", self._names[host], *command]

    def set_names(self, host: int, names: dict[str, str]) -> None:
        """Sets what a host resolves names to: name → address. It has no name server."""
        folder = pathlib.Path("/etc/netns") / self._names[host]
        lines = [f"{address} {name}\n" for name, address in names.items()]
        (folder / "hosts").write_text("127.0.0.1 localhost\n" + "".join(lines), encoding="utf-8")

    def cut(self, *pairs: tuple[int, int]) -> None:
        """Drops all packets from the first to the second host of each pair."""
        self._cut |= set(pairs)

    def isolate(self, host: int) -> None:
        """Drops all packets from and to a host."""
        others = [other for other in range(self._num_hosts) if other != host]
        self.cut(*[(host, other) for other in others], *[(other, host) for other in others])

    def heal(self) -> None:
        """Ends every partition."""
        self._cut = set()

    def _create(self, host: int) -> int:
        """Creates a host; returns the descriptor of its device."""
        name = self._names[host]
        _ip("netns", "add", name)
        self._stack.callback(_ip, "netns", "del", name)
        folder = pathlib.Path("/etc/netns") / name
        folder.mkdir(parents=True)
        self._stack.callback(folder.rmdir)
        for file in ("hosts", "resolv.conf"):  # `ip netns exec` shows these to the host.
            (folder / file).touch()
            self._stack.callback((folder / file).unlink)
        device = _open_device(name)
        self._stack.callback(os.close, device)
        _ip("-n", name, "link", "set", "lo", "up")
        _ip("-n", name, "address", "add", f"{self.address(host)}/24", "dev", "tun0")
        _ip("-n", name, "link", "set", "tun0", "mtu", str(self._mtu), "txqueuelen", "1000", "up")
        return device

    def _forward(self, end: int) -> None:
        """Forwards packets until the other end of the pipe `end` is closed."""
        waiting: list[tuple[float, int, int, bytes]] = []  # When, serial number, device, packet.
        free_at = [0.0] * self._num_hosts  # When each host's link has sent all before.
        serial = itertools.count()
        while True:
            timeout = max(0.0, waiting[0][0] - time.monotonic()) if waiting else None
            readable, _, _ = select.select([*self._devices, end], [], [], timeout)
            if end in readable:
                return
            now = time.monotonic()
            for device in readable:
                host = self._devices.index(device)
                for packet in _packets(device):
                    due = self._due(host, packet, now, free_at)
                    if due is not None:
                        target = self._devices[packet[19] - 1]
                        heapq.heappush(waiting, (due, next(serial), target, packet))
            while waiting and waiting[0][0] <= time.monotonic():
                _, _, target, packet = heapq.heappop(waiting)
                self.num_bytes += len(packet)
                with contextlib.suppress(OSError):  # The receiving queue is full.
                    os.write(target, packet)

    def _due(self, host: int, packet: bytes, now: float, free_at: list[float]) -> float | None:
        """Returns when a packet arrives; None if it does not."""
        is_ours = packet[0] >> 4 == 4 and packet[16:19] == bytes((10, 98, 0))
        if not is_ours or not 1 <= packet[19] <= self._num_hosts:
            return None
        link = self.link
        sent_at = max(now, free_at[host]) + len(packet) * 8 / link.bits_per_sec
        if sent_at - now > max(_QUEUE_SEC, 2 * link.latency_sec):
            return None
        free_at[host] = sent_at
        if (host, packet[19] - 1) in self._cut or self._random.random() < link.loss:
            return None
        return sent_at + link.latency_sec


def _packets(device: int) -> list[bytes]:
    """Returns the packets that a device has ready, up to 64."""
    packets = []
    with contextlib.suppress(BlockingIOError):
        for _ in range(64):
            packets.append(os.read(device, 65536))
    return packets


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


def _open_device(namespace: str) -> int:
    """Creates `tun0` in a namespace; returns its descriptor, which does not block."""
    descriptors: list[int] = []
    errors: list[OSError] = []

    def create() -> None:  # Only this thread enters the namespace.
        try:
            with open(f"/run/netns/{namespace}", "rb") as file:
                if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), _CLONE_NEWNET):
                    raise OSError(ctypes.get_errno(), "cannot enter the namespace")
            device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
            fcntl.ioctl(device, _TUNSETIFF, struct.pack("16sH22x", b"tun0", _IFF_TUN | _IFF_NO_PI))
            descriptors.append(device)
        except OSError as error:
            errors.append(error)

    thread = threading.Thread(target=create)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
    return descriptors[0]
