"""Trains with two workers, each in a network namespace of its own, over a network that fails.

Whatever happens, no worker hangs, each ends with one clear line, and after the same command was
started again the weights are bitwise those of an undisturbed training. Needs root (Linux).
"""

import collections
import contextlib
import itertools
import json
import os
import pathlib
import secrets
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence

from . import CampaignError, Options, check, harness
from .harness import Program

END_SEC = 90.0  # Within which all workers end when one is lost.
LOST = {0, 138, -signal.SIGKILL, 134, -signal.SIGABRT}  # Exit codes of a disturbed worker.
NUMBERS = itertools.count()
ADDRESSES = ("10.98.0.1", "10.98.0.2")


class Network:
    """Two hosts in namespaces, joined by a switch in another one; a context manager."""

    def __enter__(self) -> "Network":
        prefix = f"ls{os.getpid()}-{next(NUMBERS)}-"
        self._switch, self._hosts = f"{prefix}s", [f"{prefix}{host}" for host in range(2)]
        with contextlib.ExitStack() as stack:
            for name in (self._switch, *self._hosts):
                _run("netns", "add", name)
                stack.callback(_run, "netns", "del", name)
            _run("-n", self._switch, "link", "add", "br0", "type", "bridge")
            _run("-n", self._switch, "link", "set", "br0", "up")
            for host, name in enumerate(self._hosts):
                peer = ("type", "veth", "peer", "name", f"p{host}", "netns", self._switch)
                _run("link", "add", "eth0", "netns", name, *peer)
                _run("-n", self._switch, "link", "set", f"p{host}", "master", "br0", "up")
                _run("-n", name, "address", "add", f"{ADDRESSES[host]}/24", "dev", "eth0")
                _run("-n", name, "link", "set", "eth0", "up")
                _run("-n", name, "link", "set", "lo", "up")
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *exception: object) -> None:
        self._stack.close()

    def command(self, host: int, *command: str) -> list[str]:
        """Returns the command that runs `command` on a host."""
        return ["ip", "netns", "exec", self._hosts[host], *command]

    def limit(self, rate: str) -> None:
        """Limits what every host receives, for example "10mbit"."""
        shape = ("root", "tbf", "rate", rate, "burst", "256kb", "latency", "500ms")
        for host in range(2):
            on_port = ("-n", self._switch, "qdisc", "add", "dev", f"p{host}")
            _run(*on_port, *shape, program="tc")

    def isolate(self, state: str) -> None:
        """Cuts host 1 from the other with "down", or joins it again with "up"."""
        _run("-n", self._switch, "link", "set", "p1", state)

    def cut(self, sender: int) -> None:
        """Loses all packets in one direction, by a wrong hardware address."""
        wrong = ("lladdr", "02:00:00:00:00:99", "dev", "eth0", "nud", "permanent")
        _run("-n", self._hosts[sender], "neigh", "replace", ADDRESSES[1 - sender], *wrong)


def _run(*words: str, program: str = "ip") -> None:
    subprocess.run([program, *words], check=True, capture_output=True)


def unavailable() -> str:
    """Returns why this machine cannot have such a network; empty if it can."""
    try:
        with Network():
            return ""
    except (OSError, subprocess.CalledProcessError) as error:
        return f"network namespaces need root, ip and tc: {error}"


class Cluster:
    """A training by two workers, and the run directories of its faults in a folder."""

    def __init__(self, folder: pathlib.Path):
        self._folder, self.number, self._weights = folder, 0, ""
        self._data_dir = harness.write_data(folder / "data")
        with Network() as network:
            self.finish(network)
        self._weights = harness.finished_weights(self.run_dir)

    @property
    def run_dir(self) -> pathlib.Path:
        """The run directory of the current fault."""
        return self._folder / f"run {self.number}"

    def start(self, network: Network) -> list[Program]:
        """Starts both workers, each on its host."""
        words = [*harness.MAIN, "--strategy=multi_worker", *harness.TRAIN, "--num_devices=1"]
        words += [f"--data_dir={self._data_dir}", f"--out={self.run_dir}"]
        secret, programs = secrets.token_hex(), []
        for index in (0, 1):
            task = {"type": "worker", "index": index}
            config = {"cluster": {"worker": [f"{a}:2222" for a in ADDRESSES]}, "task": task}
            environment = {"TF_CONFIG": json.dumps(config), "LOCKSTEP_SECRET": secret}
            output = self._folder / f"worker {index}.txt"
            programs.append(Program(network.command(index, *words), output, environment))
        return programs

    def finish(self, network: Network) -> list[int]:
        """Starts the workers and lets them finish; checks the weights."""
        programs = self.start(network)
        codes = self.wait(programs, 1200)
        check(set(codes) == {0}, f"codes {codes}\n{_outputs(programs)}")
        weights = harness.finished_weights(self.run_dir)
        check(self._weights in ("", weights), "other weights")
        return codes

    def wait(self, programs: Sequence[Program], timeout_sec: float) -> list[int]:
        """Waits for all workers, checks what they have printed; returns their exit codes."""
        try:
            codes = [program.wait(timeout_sec) for program in programs]
            for program, code in zip(programs, codes, strict=True):
                if code not in LOST - {0, 138}:
                    harness.check_output(program, code)
                program.check_no_process_is_left()
            return codes
        finally:
            for program in programs:
                program.kill_all()

    def disturb(
        self,
        begin: Callable[[Network, Program], object],
        end: Callable[[Network, Program], object] = lambda network, worker: None,
        sec: float = 0,
    ) -> list[int]:
        """Disturbs a training after its first checkpoint; if that ends it, resumes it."""
        with Network() as network:
            programs, deadline = self.start(network), time.monotonic() + 300
            while not harness.checkpoints(self.run_dir):
                running = all(program.process.poll() is None for program in programs)
                is_early = running and time.monotonic() < deadline
                check(is_early, f"no checkpoint\n{_outputs(programs)}")
                time.sleep(0.02)
            begin(network, programs[1])
            time.sleep(sec)
            end(network, programs[1])
            codes = self.wait(programs, END_SEC)
            check({*codes} <= LOST, f"codes {codes}")
        with Network() as network:
            self.finish(network)
        return codes


def _outputs(programs: Sequence[Program]) -> str:
    return "\n".join(program.text() for program in programs)


def _slow(cluster: Cluster, rate: str) -> list[int]:
    with Network() as network:
        network.limit(rate)
        return cluster.finish(network)


def _partition(cluster: Cluster, sec: float) -> list[int]:
    return cluster.disturb(lambda n, _: n.isolate("down"), lambda n, _: n.isolate("up"), sec)


def _signal(number: int) -> Callable[[Network, Program], None]:
    def send(network: Network, worker: Program) -> None:
        if worker.process.poll() is None:
            worker.process.send_signal(number)

    return send


def _frozen(cluster: Cluster, sec: float) -> list[int]:
    return cluster.disturb(_signal(signal.SIGSTOP), _signal(signal.SIGCONT), sec)


FAULTS: dict[str, Callable[[Cluster], list[int]]] = {
    "10 Mbit/s": lambda c: _slow(c, "10mbit"),
    "partition of 5 s": lambda c: _partition(c, 5),
    "partition of 60 s": lambda c: _partition(c, 60),
    "nothing from worker 0": lambda c: c.disturb(lambda n, _: n.cut(0)),
    "nothing from worker 1": lambda c: c.disturb(lambda n, _: n.cut(1)),
    "worker killed": lambda c: c.disturb(_signal(signal.SIGKILL)),
    "worker frozen for 5 s": lambda c: _frozen(c, 5),
    "worker frozen for 60 s": lambda c: _frozen(c, 60),
}


def run(folder: pathlib.Path, options: Options, counts: collections.Counter) -> Iterator[str]:
    """Tries the faults in order; yields what each one did."""
    if reason := unavailable():
        raise CampaignError(reason)
    cluster = Cluster(folder)
    names = [name for name in FAULTS if options.wants(name)]
    for name in itertools.islice(itertools.cycle(names), options.cycles or len(names)):
        cluster.number += 1
        start = time.monotonic()
        codes = FAULTS[name](cluster)
        counts["faults"] += 1
        yield f"{name}: exit codes {codes}, same weights, {time.monotonic() - start:.0f} s"
