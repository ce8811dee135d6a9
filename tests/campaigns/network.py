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
    """Two hosts in namespaces, joined by a cable; a context manager."""

    def __enter__(self) -> "Network":
        number = next(NUMBERS)
        self._hosts = [f"ls{os.getpid()}-{number}-{host}" for host in range(2)]
        with contextlib.ExitStack() as stack:
            for name in self._hosts:
                _run("ip", "netns", "add", name)
                stack.callback(_run, "ip", "netns", "del", name)
            first, second = self._hosts
            peer = ("type", "veth", "peer", "name", "eth0", "netns", second)
            _run("ip", "link", "add", "eth0", "netns", first, *peer)
            for address, name in zip(ADDRESSES, self._hosts, strict=True):
                _run("ip", "-n", name, "address", "add", f"{address}/24", "dev", "eth0")
                for link in ("eth0", "lo"):
                    _run("ip", "-n", name, "link", "set", link, "up")
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *exception: object) -> None:
        self._stack.close()

    def command(self, host: int, *command: str) -> list[str]:
        """Returns the command that runs `command` on a host."""
        return ["ip", "netns", "exec", self._hosts[host], *command]

    def limit(self, rate: str) -> None:
        """Limits what every host sends, for example "10mbit"."""
        shape = ("tbf", "rate", rate, "burst", "256kb", "latency", "500ms")
        for name in self._hosts:
            _run("tc", "-n", name, "qdisc", "add", "dev", "eth0", "root", *shape)

    def cut(self, *senders: int) -> None:
        """Loses all packets of some hosts, by a wrong hardware address."""
        wrong = ("lladdr", "02:00:00:00:00:99", "dev", "eth0", "nud", "permanent")
        for host in senders:
            _run("ip", "-n", self._hosts[host], "neigh", "replace", ADDRESSES[1 - host], *wrong)

    def join(self) -> None:
        """Ends what `cut` of both hosts did."""
        for host, name in enumerate(self._hosts):
            _run("ip", "-n", name, "neigh", "del", ADDRESSES[1 - host], "dev", "eth0")


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True)


def unavailable() -> str:
    """Returns why this machine cannot have such a network; empty if it can."""
    try:
        with Network():
            return ""
    except (OSError, subprocess.CalledProcessError) as error:
        return f"network namespaces need root, ip and tc: {error}"


Act = Callable[[Network, Program], None]


class Cluster:
    """A training by two workers, and the run directories of its faults in a folder."""

    def __init__(self, folder: pathlib.Path):
        self._folder, self.number, self._weights = folder, 0, ""
        with Network() as network:
            self.finish(network)
        self._weights = harness.finished_weights(self.run_dir)

    @property
    def run_dir(self) -> pathlib.Path:
        """The run directory of the current fault."""
        return self._folder / f"run {self.number}"

    def start(self, network: Network) -> list[Program]:
        """Starts both workers, each on its host."""
        words = [*harness.MAIN, "--strategy=multi_worker", *harness.TRAIN]
        words.append(f"--out={self.run_dir}")
        programs = []
        for index in (0, 1):
            task = {"type": "worker", "index": index}
            config = {"cluster": {"worker": [f"{a}:2222" for a in ADDRESSES]}, "task": task}
            environment = {"TF_CONFIG": json.dumps(config)}
            output = self._folder / f"worker {index}.txt"
            programs.append(Program(network.command(index, *words), output, environment))
        return programs

    def finish(self, network: Network) -> None:
        """Starts the workers and lets them finish; checks the weights."""
        programs = self.start(network)
        codes = self.wait(programs, 1200)
        check(set(codes) == {0}, f"codes {codes}\n{_outputs(programs)}")
        weights = harness.finished_weights(self.run_dir)
        check(self._weights in ("", weights), "other weights")

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

    def disturb(self, begin: Act, end: Act, sec: float) -> list[int]:
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


def _send(number: int) -> Act:
    def send(network: Network, worker: Program) -> None:
        if worker.process.poll() is None:
            worker.process.send_signal(number)

    return send


def _cut(*senders: int) -> Act:
    return lambda network, worker: network.cut(*senders)


def _join(network: Network, worker: Program) -> None:
    network.join()


def _nothing(network: Network, worker: Program) -> None:
    return


FAULTS: dict[str, tuple[Act, Act, float]] = {  # What begins it, what ends it, seconds between.
    "10 Mbit/s": (lambda network, _: network.limit("10mbit"), _nothing, 0),
    "partition of 5 s": (_cut(0, 1), _join, 5),
    "partition of 60 s": (_cut(0, 1), _join, 60),
    "nothing from worker 0": (_cut(0), _nothing, 0),
    "nothing from worker 1": (_cut(1), _nothing, 0),
    "worker killed": (_send(signal.SIGKILL), _nothing, 0),
    "worker frozen for 5 s": (_send(signal.SIGSTOP), _send(signal.SIGCONT), 5),
    "worker frozen for 60 s": (_send(signal.SIGSTOP), _send(signal.SIGCONT), 60),
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
        codes = cluster.disturb(*FAULTS[name])
        counts["faults"] += 1
        yield f"{name}: exit codes {codes}, same weights, {time.monotonic() - start:.0f} s"
