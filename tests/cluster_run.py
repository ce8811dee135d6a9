"""Starts the workers of a training on the hosts of a `Network`, and waits for their end."""

import os
import pathlib
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Sequence

from app.devices.cluster import Cluster
from app.runtime.subprocesses import child_environment
from network import Network

ROOT = pathlib.Path(__file__).parents[1]
PORT = 2222


class ClusterRun:
    """The worker processes of one start; a context manager, which kills what is left of them.

    Each has a core of its own, as far as there are any.

    Args:
        network: its host i runs worker i.
        flags: of `train`, without the strategy; `--out` for the chief, too.
        folder: folder for the output of the workers.
        num_workers: number of workers.
        names: host names in the place of addresses; empty for addresses.
        environments: additional environment variables of each worker.
        hosts: host of each worker; by default i for worker i.
    """

    def __init__(
        self,
        network: Network,
        flags: Sequence[str],
        folder: pathlib.Path,
        num_workers: int,
        *,
        names: Sequence[str] = (),
        environments: Sequence[dict[str, str]] = (),
        hosts: Sequence[int] = (),
    ):
        hosts = hosts or range(num_workers)
        addresses = tuple(f"{name}:{PORT}" for name in names or map(network.address, hosts))
        secret = secrets.token_hex()
        command = [sys.executable, str(ROOT / "main.py"), "train", "--strategy=multi_worker"]
        cores = sorted(os.sched_getaffinity(0))
        self._outputs = [folder / f"worker {index}.txt" for index in range(num_workers)]
        self.processes = []
        for index, path in enumerate(self._outputs):
            cluster = Cluster(addresses, index, secret=secret).as_environment()
            started = network.command(hosts[index], *command, *flags)
            own = environments[index] if environments else {}
            with open(path, "wb") as output:
                self.processes.append(
                    subprocess.Popen(
                        ["taskset", "-c", str(cores[index % len(cores)]), *started],
                        stdout=output,
                        stderr=output,
                        env={**child_environment(**cluster), **own},
                        start_new_session=True,
                    )
                )

    def __enter__(self) -> "ClusterRun":
        return self

    def __exit__(self, *exception: object) -> None:
        for index, process in enumerate(self.processes):
            self.signal(index, signal.SIGKILL)
            process.wait()

    def signal(self, index: int, number: int) -> None:
        """Sends a signal to a worker, if it runs."""
        process = self.processes[index]
        if process.poll() is None:
            os.kill(process.pid, number)

    def wait(self, timeout_sec: float) -> list[int | None]:
        """Waits until all workers have ended; returns their exit codes, None after the timeout."""
        deadline = time.monotonic() + timeout_sec
        while None in self.codes() and time.monotonic() < deadline:
            time.sleep(0.05)
        return self.codes()

    def codes(self) -> list[int | None]:
        """Returns the exit codes of the workers; None for one that runs."""
        return [process.poll() for process in self.processes]

    def output(self, index: int) -> str:
        """Returns what a worker has printed so far."""
        return self._outputs[index].read_text(encoding="utf-8", errors="replace")

    def last_line(self, index: int) -> str:
        """Returns the last line that a worker has printed; empty without one."""
        return (self.output(index).strip().splitlines() or [""])[-1]
