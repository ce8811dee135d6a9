"""Trains in networks that are slow, lossy or cut, and beside strangers: `make network-faults`.

Each worker runs in a network namespace of its own (network.py); it needs root. Whatever happens,
no worker may hang, each ends with one clear line, and after the same command was started again, the
weights are bitwise those of an undisturbed training.
"""

import argparse
import dataclasses
import pathlib
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence

ROOT = pathlib.Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from app.records.history import load_summary
from cluster_run import PORT, ClusterRun
from idx_files import write_data
from network import Link, Network, unavailable

EPOCHS = 3
TIMEOUT_SEC = 300
FLAGS = (
    *("--device=cpu", "--num_devices=1", "--recipe=fast", "--deterministic"),
    *("--allow_unverified_data", "--global_batch_size=50", f"--epochs={EPOCHS}"),
    *("--checkpoint_every=3", "--steps_per_call=1"),
)
LINK = Link(latency_sec=0.02)  # A step takes 0.2 s, so that there is time for a fault.
LOST = 138
_END_SEC = 60.0  # Within which all workers end when one is lost.
_SERVER = """
import socket, sys
server = socket.create_server(("0.0.0.0", int(sys.argv[1])))
kept = []
while True:
    connection, _ = server.accept()
    kept.append(connection)
    connection.sendall(bytes.fromhex(sys.argv[2]))
"""
_CLOCK = """
import time
now, now_ns = time.time, time.time_ns
time.time = lambda: now() + {0}
time.time_ns = lambda: now_ns() + {0} * 10**9
"""
_STRANGER = """
import os, socket, sys, time
address, kind = (sys.argv[1], int(sys.argv[2])), sys.argv[3]
while True:
    try:
        socket.create_connection(address, timeout=1).close()
        break
    except OSError:
        time.sleep(0.01)
sent = []
try:
    if kind == "connections":
        for _ in range(10_000):
            sent.append(socket.create_connection(address, timeout=5))
            sent = sent[-500:]
    else:
        connection = socket.create_connection(address, timeout=5)
        connection.sendall(b'{"secret": "')
        for _ in range(1024):
            connection.sendall(os.urandom(1 << 20))
except OSError:
    pass
"""


class FaultError(Exception):
    """A check that failed."""


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What was seen of a fault.

    Attributes:
        codes: exit codes of the first start.
        line: last line of the first worker that did not finish; of the chief, if all did.
        end_sec: seconds from the fault to the end of the first worker that noticed it, else 0.
        recovery_sec: seconds from the start of the resumed training to its end; 0 without one.
    """

    codes: list[int | None]
    line: str
    end_sec: float = 0.0
    recovery_sec: float = 0.0


class Cluster:
    """A small training by workers in a network.

    Args:
        folder: folder for all files.
        num_workers: number of workers.
    """

    def __init__(self, folder: pathlib.Path, num_workers: int = 2):
        self.folder, self.num_workers = folder, num_workers
        self._number = 0
        if not (folder / "data").exists():
            write_data(folder / "data")
        with self.network() as network, self.start(network) as run:
            check(run.wait(TIMEOUT_SEC) == [0] * num_workers, "the undisturbed run failed", run)
        self.weights_sha256 = load_summary(self.run_dir).weights_sha256

    @property
    def run_dir(self) -> pathlib.Path:
        """The run directory of the current fault."""
        return self.folder / f"run {self._number}"

    def next_run(self) -> None:
        """Moves on to a new run directory."""
        self._number += 1

    def network(self, link: Link = LINK, num_hosts: int | None = None) -> Network:
        """Returns a network with a host for each worker, or more."""
        return Network(num_hosts or self.num_workers, link, seed=self._number)

    def start(self, network: Network, *flags: str, **arguments) -> ClusterRun:
        """Starts the workers in `run_dir`."""
        all_flags = [*FLAGS, f"--data_dir={self.folder / 'data'}", f"--out={self.run_dir}", *flags]
        num_workers = arguments.pop("num_workers", self.num_workers)
        return ClusterRun(network, all_flags, self.folder, num_workers, **arguments)

    def wait_for_step(self, run: ClusterRun) -> None:
        """Waits until the first checkpoint has been saved."""
        deadline = time.monotonic() + TIMEOUT_SEC
        while not list((self.run_dir / "checkpoints").glob("step-*")):
            check(None in run.codes(), "it ended too early", run)
            check(time.monotonic() < deadline, "no step in time", run)
            time.sleep(0.02)

    def finish(self, network: Network, **arguments) -> float:
        """Starts the workers again until they finish; returns the seconds of it."""
        start = time.monotonic()
        with self.start(network, **arguments) as run:
            codes = run.wait(TIMEOUT_SEC)
            check(set(codes) == {0}, f"resumed, it ended with {codes}", run)
        self.check_weights()
        return time.monotonic() - start

    def check_weights(self) -> None:
        """Checks that the run has the weights of the undisturbed one."""
        summary = load_summary(self.run_dir)
        if (summary.status, summary.weights_sha256) != ("finished", self.weights_sha256):
            raise FaultError(f"{self.run_dir}: other weights, or not finished")


def check(holds: bool, what: str, run: ClusterRun) -> None:
    """Raises an error with the output of the workers if something does not hold."""
    if not holds:
        outputs = "\n".join(run.output(i)[-1500:] for i in range(len(run.processes)))
        raise FaultError(f"{what}; codes {run.codes()}\n{outputs}")


def _survived(cluster: Cluster, link: Link) -> Outcome:
    """Trains over a link from beginning to end."""
    with cluster.network(link) as network, cluster.start(network) as run:
        codes = run.wait(TIMEOUT_SEC * 3)
        check(set(codes) == {0}, "it did not survive", run)
        cluster.check_weights()
        return Outcome(codes, run.last_line(0))


def _interrupted(
    cluster: Cluster,
    interrupt: Callable[[Network, ClusterRun], None],
    *,
    for_sec: float,
    expected: Sequence[int],
) -> Outcome:
    """Disturbs a training for a time; if that ends it, resumes it."""
    with cluster.network() as network:
        with cluster.start(network) as run:
            cluster.wait_for_step(run)
            start, end_sec = time.monotonic(), 0.0
            interrupt(network, run)
            while None in run.codes() and time.monotonic() < start + for_sec:
                if LOST in run.codes():  # Not the worker that is frozen or killed.
                    end_sec = end_sec or time.monotonic() - start
                time.sleep(0.05)
            network.heal()
            for index in range(cluster.num_workers):
                run.signal(index, signal.SIGCONT)
            codes = run.wait(start + for_sec + _END_SEC - time.monotonic())
            check(all(code in expected for code in codes), f"expected {expected}", run)
            if set(codes) == {0}:
                cluster.check_weights()
                return Outcome(codes, run.last_line(0))
            check(end_sec > 0 or for_sec < _END_SEC, "no worker has ended in time", run)
            line = run.last_line(codes.index(LOST))
        end_sec = end_sec or time.monotonic() - start
        return Outcome(codes, line, end_sec, cluster.finish(network))


def _never_met(cluster: Cluster, disturb: Callable[[Network], list[subprocess.Popen]]) -> Outcome:
    """Starts worker 0 where worker 1 cannot be met; then starts both."""
    with cluster.network() as network:
        others = disturb(network)
        try:
            names = [network.address(0), "worker-1"]
            network.set_names(0, {"worker-1": network.address(1)} if others else {})
            start = time.monotonic()
            with cluster.start(
                network, "--start_timeout_sec=12", names=names, num_workers=2
            ) as run:
                run.signal(1, signal.SIGKILL)
                codes = run.wait(TIMEOUT_SEC)
                end_sec = time.monotonic() - start
                check(codes[0] == LOST and "worker 1" in run.last_line(0), "not named", run)
                line = run.last_line(0)
        finally:
            for process in others:
                process.kill()
                process.wait()
        return Outcome(codes[:1], line, end_sec, cluster.finish(network))


def _server(network: Network, answer: bytes = b"") -> list[subprocess.Popen]:
    command = network.command(1, sys.executable, "-c", _SERVER, str(PORT), answer.hex())
    return [subprocess.Popen(command)]


def _moved(cluster: Cluster) -> Outcome:
    """Kills a worker, and starts it on another host with the same name."""
    names = ["worker-0", "worker-1"]
    with cluster.network(num_hosts=3) as network:
        for host in range(3):
            network.set_names(
                host, {"worker-0": network.address(0), "worker-1": network.address(1)}
            )
        with cluster.start(network, names=names) as run:
            cluster.wait_for_step(run)
            start = time.monotonic()
            run.signal(1, signal.SIGKILL)
            codes = run.wait(_END_SEC)
            end_sec = time.monotonic() - start
            check(codes[0] == LOST, "the survivor did not end", run)
            line = run.last_line(0)
        for host in range(3):
            network.set_names(
                host, {"worker-0": network.address(0), "worker-1": network.address(2)}
            )
        return Outcome(codes, line, end_sec, cluster.finish(network, names=names, hosts=(0, 2)))


def _beside_stranger(cluster: Cluster, kind: str) -> Outcome:
    """Trains while a process without the secret fills the rendezvous port of the chief."""
    with cluster.network(num_hosts=3) as network:
        stranger = subprocess.Popen(
            network.command(2, sys.executable, "-c", _STRANGER, network.address(0), str(PORT), kind)
        )
        try:
            with cluster.start(network) as run:
                codes = run.wait(TIMEOUT_SEC)
                check(set(codes) == {0}, "a stranger kept the workers from training", run)
                check(
                    f"dropped a connection from {network.address(2)}" in run.output(0),
                    "the stranger was not reported",
                    run,
                )
                cluster.check_weights()
                return Outcome(codes, run.last_line(0))
        finally:
            stranger.kill()
            stranger.wait()


def _with_clock(cluster: Cluster, offset_sec: int) -> Outcome:
    """Trains with Python's clock of worker 1 off; that of TensorFlow's C++ code is right."""
    folder = cluster.folder / f"clock {offset_sec}"
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(_CLOCK.format(offset_sec), encoding="utf-8")
    wrong = {"PYTHONPATH": str(folder)}
    with cluster.network() as network, cluster.start(network, environments=[{}, wrong]) as run:
        codes = run.wait(TIMEOUT_SEC)
        check(set(codes) == {0}, "clocks mattered", run)
        cluster.check_weights()
        return Outcome(codes, run.last_line(0))


def _isolate(network: Network, run: ClusterRun) -> None:
    network.isolate(1)


def _send(index: int, number: int) -> Callable[[Network, ClusterRun], None]:
    return lambda network, run: run.signal(index, number)


def _cut(sender: int) -> Callable[[Network, ClusterRun], None]:
    return lambda network, run: network.cut((sender, 1 - sender))


def _while_meeting(cluster: Cluster) -> Outcome:
    """Cuts the network off and on while the workers meet."""
    with cluster.network() as network, cluster.start(network) as run:
        end = time.monotonic() + 12
        while time.monotonic() < end:
            network.isolate(1)
            time.sleep(0.7)
            network.heal()
            time.sleep(0.3)
        codes = run.wait(TIMEOUT_SEC)
        check(set(codes) == {0}, "the workers did not meet", run)
        cluster.check_weights()
        return Outcome(codes, run.last_line(0))


_KILLED = -signal.SIGKILL
FAULTS: dict[str, Callable[[Cluster], Outcome]] = {
    "latency 1 ms": lambda c: _survived(c, Link(0.001)),
    "latency 10 ms": lambda c: _survived(c, Link(0.01)),
    "latency 100 ms": lambda c: _survived(c, Link(0.1)),
    "loss 1 %": lambda c: _survived(c, Link(0.005, 0.01)),
    "loss 10 %": lambda c: _survived(c, Link(0.005, 0.1)),
    "loss 10 %, latency 100 ms": lambda c: _survived(c, Link(0.1, 0.1)),
    "10 Mbit/s": lambda c: _survived(c, Link(0.001, bits_per_sec=1e7)),
    "1 Gbit/s": lambda c: _survived(c, Link(0.001, bits_per_sec=1e9)),
    "partition of 5 s": lambda c: _interrupted(c, _isolate, for_sec=5, expected=(0,)),
    "partition of 60 s": lambda c: _interrupted(c, _isolate, for_sec=60, expected=(LOST,)),
    "nothing from worker 0 for 60 s": lambda c: _interrupted(
        c, _cut(0), for_sec=60, expected=(LOST,)
    ),
    "nothing from worker 1 for 60 s": lambda c: _interrupted(
        c, _cut(1), for_sec=60, expected=(LOST,)
    ),
    "partitions while the workers meet": _while_meeting,
    "worker 0 killed": lambda c: _interrupted(
        c, _send(0, signal.SIGKILL), for_sec=60, expected=(LOST, _KILLED)
    ),
    "worker 1 killed": lambda c: _interrupted(
        c, _send(1, signal.SIGKILL), for_sec=60, expected=(LOST, _KILLED)
    ),
    "worker 1 frozen for 5 s": lambda c: _interrupted(
        c, _send(1, signal.SIGSTOP), for_sec=5, expected=(0,)
    ),
    "worker 1 frozen for 60 s": lambda c: _interrupted(
        c, _send(1, signal.SIGSTOP), for_sec=60, expected=(LOST,)
    ),
    "clock an hour late": lambda c: _with_clock(c, -3600),
    "clock an hour early": lambda c: _with_clock(c, 3600),
    "name does not resolve": lambda c: _never_met(c, lambda network: []),
    "port accepts, never answers": lambda c: _never_met(c, _server),
    "port answers garbage": lambda c: _never_met(c, lambda n: _server(n, b"\xff\0garbage" * 99)),
    "address changes": _moved,
    "stranger sends 1 GiB": lambda c: _beside_stranger(c, "bytes"),
    "stranger connects 10,000 times": lambda c: _beside_stranger(c, "connections"),
}


def try_fault(cluster: Cluster, name: str) -> Outcome:
    """Trains with one fault in a new run directory."""
    cluster.next_run()
    return FAULTS[name](cluster)


def main() -> int:
    """Tries the requested faults; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("faults", nargs="*", help=f"of: {', '.join(FAULTS)}")
    options = parser.parse_args()
    if reason := unavailable():
        raise SystemExit(reason)
    failed = 0
    with tempfile.TemporaryDirectory(prefix="network-faults-") as folder:
        cluster = Cluster(pathlib.Path(folder))
        for name in options.faults or FAULTS:
            start = time.monotonic()
            try:
                seen = try_fault(cluster, name)
            except FaultError as error:
                failed += 1
                print(f"{name}: FAILED after {time.monotonic() - start:.0f} s: {error}", flush=True)
                continue
            times = f"{time.monotonic() - start:.0f} s"
            if seen.recovery_sec:
                times = f"ended after {seen.end_sec:.1f} s, resumed in {seen.recovery_sec:.1f} s"
            print(f"{name}: exit codes {seen.codes}, {times}: {seen.line}", flush=True)
    print(f"{failed} failed" if failed else "all as expected")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
