"""Trains with two workers, each in a network namespace of its own, over a network that fails.

Whatever happens, no worker hangs, each ends with one clear line, and after the same command was
started again the weights are bitwise those of an undisturbed training. Needs root (Linux).
"""

import contextlib
import itertools
import json
import os
import pathlib
import signal
import subprocess
import time

from . import CampaignError, check, harness
from .harness import Program

END_SEC = 90.0  # Within which all workers end when one is lost.
LOST = {0, 138, -signal.SIGKILL, 134, -signal.SIGABRT}  # Exit codes of a disturbed worker.
NUMBERS = itertools.count()
ADDRESSES = ("10.98.0.1", "10.98.0.2")


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True)


class Network(contextlib.ExitStack):
    """Two hosts in namespaces, joined by a cable."""

    def __enter__(self):
        number = next(NUMBERS)
        self.hosts = first, second = [f"ls{os.getpid()}-{number}-{host}" for host in range(2)]
        with contextlib.ExitStack() as stack:  # Undoes what was made before an error.
            for name in self.hosts:
                _run("ip", "netns", "add", name)
                stack.callback(_run, "ip", "netns", "del", name)
            peer = ("type", "veth", "peer", "name", "eth0", "netns", second)
            _run("ip", "link", "add", "eth0", "netns", first, *peer)
            for address, name in zip(ADDRESSES, self.hosts, strict=True):
                _run("ip", "-n", name, "address", "add", f"{address}/24", "dev", "eth0")
                for link in ("eth0", "lo"):
                    _run("ip", "-n", name, "link", "set", link, "up")
            self.push(stack.pop_all())
        return super().__enter__()

    def limit(self, rate: str) -> None:
        shape = ("tbf", "rate", rate, "burst", "256kb", "latency", "500ms")
        for name in self.hosts:
            _run("tc", "-n", name, "qdisc", "add", "dev", "eth0", "root", *shape)

    def cut(self, *senders: int) -> None:
        """Loses all packets of some hosts, by a wrong hardware address."""
        wrong = ("lladdr", "02:00:00:00:00:99", "dev", "eth0", "nud", "permanent")
        for host in senders:
            _run("ip", "-n", self.hosts[host], "neigh", "replace", ADDRESSES[1 - host], *wrong)

    def join(self) -> None:
        """Ends what `cut` of both hosts did."""
        for host, name in enumerate(self.hosts):
            _run("ip", "-n", name, "neigh", "del", ADDRESSES[1 - host], "dev", "eth0")


def unavailable() -> str:
    """Returns why this machine cannot have such a network; empty if it can."""
    try:
        with Network():
            return ""
    except (OSError, subprocess.CalledProcessError) as error:
        return f"network namespaces need root, ip and tc: {error}"


def start(network: Network, run_dir: pathlib.Path) -> list[Program]:
    """Starts both workers, each on its host."""
    programs = []
    for index, host in enumerate(network.hosts):
        task = {"type": "worker", "index": index}
        config = {"cluster": {"worker": [f"{a}:2222" for a in ADDRESSES]}, "task": task}
        words = *harness.MAIN, "--strategy=multi_worker", *harness.TRAIN, f"--out={run_dir}"
        output = run_dir.parent / f"worker {index}.txt"
        environment = {"TF_CONFIG": json.dumps(config)}
        programs.append(Program(["ip", "netns", "exec", host, *words], output, environment))
    return programs


def wait(programs: list[Program], timeout_sec: float, expected: set[int]) -> list[int]:
    """Waits for all workers, checks what they leave; returns their exit codes."""
    try:
        codes = [program.wait(timeout_sec) for program in programs]
        for program, code in zip(programs, codes, strict=True):
            if code not in LOST - {0, 138}:
                harness.check_output(program, code)
            program.check_no_process_is_left()
        texts = "\n".join(program.text() for program in programs)
        check({*codes} <= expected, f"exit codes {codes}\n{texts}")
        return codes
    finally:
        for program in programs:
            program.kill_all()


def finish(run_dir: pathlib.Path) -> str:
    """Lets the workers train to the end; returns the hash of the weights."""
    with Network() as network:
        wait(start(network, run_dir), 1200, {0})
    return harness.finished_weights(run_dir)


def disturb(run_dir: pathlib.Path, begin, end, sec: float) -> list[int]:
    """Disturbs a training after its first checkpoint; returns the exit codes."""
    with Network() as network:
        programs, deadline = start(network, run_dir), time.monotonic() + 300
        while not harness.checkpoints(run_dir):
            is_early = all(p.is_running() for p in programs) and time.monotonic() < deadline
            check(is_early, "\n".join(["no checkpoint", *(p.text() for p in programs)]))
            time.sleep(0.02)
        for act in (begin, end):
            if isinstance(act, signal.Signals):
                if programs[1].is_running():
                    programs[1].process.send_signal(act)
            elif act:
                name, *arguments = act
                getattr(network, name)(*arguments)
            time.sleep(sec if act is begin else 0)
        return wait(programs, END_SEC, LOST)


FAULTS = {  # What begins it, what ends it, seconds between: a signal of worker 1, or a method.
    "10 Mbit/s": (("limit", "10mbit"), None, 0),
    "partition of 5 s": (("cut", 0, 1), ("join",), 5),
    "partition of 60 s": (("cut", 0, 1), ("join",), 60),
    "nothing from worker 0": (("cut", 0), None, 0),
    "nothing from worker 1": (("cut", 1), None, 0),
    "worker killed": (signal.SIGKILL, None, 0),
    "worker frozen for 5 s": (signal.SIGSTOP, signal.SIGCONT, 5),
    "worker frozen for 60 s": (signal.SIGSTOP, signal.SIGCONT, 60),
}


def run(folder, options, counts):
    """Tries the faults in order; yields what each one did."""
    if reason := unavailable():
        raise CampaignError(reason)
    weights = finish(folder / "run 0")
    names = [name for name in FAULTS if options.wants(name)]
    cycles = itertools.islice(itertools.cycle(names), options.cycles or len(names))
    for number, name in enumerate(cycles, 1):
        start_sec, run_dir = time.monotonic(), folder / f"run {number}"
        codes = disturb(run_dir, *FAULTS[name])
        check(finish(run_dir) == weights, f"{name}: other weights")
        counts["faults"] += 1
        yield f"{name}: exit codes {codes}, same weights, {time.monotonic() - start_sec:.0f} s"
