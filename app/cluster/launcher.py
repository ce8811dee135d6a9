"""Starts the workers of a cluster on this machine, watches them, and starts all again if one fails.

Nothing of it needs TensorFlow. The workers are ordinary `train` processes; the kernel kills them
when this process ends, however it ends.
"""

import collections
import contextlib
import dataclasses
import itertools
import json
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from typing import IO, Any

from app.cluster.environment import Cluster
from app.cluster.resource_split import WorkerResources, find_free_ports
from app.config import LaunchConfig
from app.runtime import console, signals
from app.runtime.errors import PeerLostError, Terminated, WorkerFailedError
from app.runtime.progress_bar import PROGRESS_VARIABLE, Bar

_RETRY_FROM = 128  # Exit codes below are final.
_POLL_SEC = 0.1
_SETTLE_SEC = 2.0  # Within it, the first failure and what follows from it are told apart.
_GRACE_SEC = 60.0  # For workers that are asked to stop: one call, and a checkpoint.
_LONGEST_PAUSE_SEC = 30.0
_NUM_LAST_LINES = 5
_SEC_BETWEEN_LINES = 15.0
# What becomes of a worker that has lost another: it says so, or TensorFlow's native code aborts.
_FOLLOWS = (PeerLostError.exit_code, 128 + signal.SIGABRT)
_MAX_PORT_RETRIES = 5
_MAIN = pathlib.Path(__file__).parents[2] / "main.py"


@dataclasses.dataclass(frozen=True)
class Failure:
    """How a worker failed.

    Attributes:
        index: of the worker.
        exit_code: as a shell would tell it.
        what: what became of it.
        last_lines: what it said last.
    """

    index: int
    exit_code: int
    what: str
    last_lines: list[str]


class Launcher:
    """Trains with several processes on this machine.

    Args:
        config: of `launch`, with a directory in `out`.
        shares: one for each worker.
    """

    def __init__(self, config: LaunchConfig, shares: Sequence[WorkerResources]):
        self._config, self._shares = config, shares
        self._has_begun = False  # Whether what `--overwrite` throws away is thrown away.
        self._bar = Bar() if sys.stdout.isatty() else None
        self._last_line = time.monotonic()

    def run(self) -> None:
        """Trains until it is done, starting all workers again when one fails.

        Raises:
            WorkerFailedError: a worker has failed in a way that another try does not mend.
            PeerLostError: workers have failed more often than `config.max_restarts`.
        """
        most, port_retries = self._config.max_restarts, 0
        failures = itertools.count(1)
        while failure := self._attempt():
            _tell(failure)
            if _is_port_in_use(failure) and port_retries < _MAX_PORT_RETRIES:
                port_retries += 1
                continue
            if failure.exit_code < _RETRY_FROM:
                raise WorkerFailedError(failure.index, failure.exit_code, _reason(failure))
            number = next(failures)
            if number > most:
                raise PeerLostError(
                    f"worker {failure.index} {failure.what}, after {console.count(most, 'restart')}"
                    " (--max_restarts) — every worker has to finish; mend what it said above and"
                    " run the same command again: it goes on from the last checkpoint, if any"
                )
            pause_sec = min(2.0 ** (number - 1), _LONGEST_PAUSE_SEC)
            console.warn(
                f"restart {number} of {most}: all workers start again in {pause_sec:g} s, from the"
                " last checkpoint"
            )
            time.sleep(pause_sec)

    def _attempt(self) -> Failure | None:
        """Runs all workers once; none of them is left when it returns."""
        workers: list[_Worker] = []
        with contextlib.ExitStack() as stack:
            if self._bar:
                self._bar.start()
                stack.callback(self._bar.stop)
            # Workers are killed, and could not remove what TensorFlow leaves in it.
            temporary = stack.enter_context(
                tempfile.TemporaryDirectory(prefix="lockstep-", ignore_cleanup_errors=True)
            )
            stack.callback(_end, workers)
            addresses = tuple(f"127.0.0.1:{port}" for port in find_free_ports(len(self._shares)))
            for index, share in enumerate(self._shares):
                cluster = Cluster(addresses, index)
                environment = {**os.environ, "TMPDIR": temporary}
                workers.append(
                    _Worker(self._command(), environment, cluster, share, self._show, self._say)
                )
            try:
                return self._watch(workers)
            except (KeyboardInterrupt, Terminated):
                _ask_to_stop(workers)
                raise

    def _command(self) -> list[str]:
        config = self._config
        flags = config.train_config().train_flags()
        if self._has_begun:
            flags = [flag for flag in flags if not flag.startswith("--overwrite")]
        return [sys.executable, str(_MAIN), "train", *flags, f"--out={config.out}"]

    def _watch(self, workers: "list[_Worker]") -> Failure | None:
        """Waits until all have finished, or one has failed."""
        first_end = None
        while True:
            codes = [worker.exit_code for worker in workers]
            if any(codes):
                return _find_culprit(workers)
            if all(code == 0 for code in codes):
                return None
            if 0 in codes:
                first_end = first_end or time.monotonic()
                if time.monotonic() - first_end > _GRACE_SEC:
                    index = codes.index(None)
                    return workers[index].failure(_RETRY_FROM, "does not end")
            time.sleep(_POLL_SEC)

    def _show(self, state: dict) -> None:
        if not self._has_begun:
            self._has_begun = True
            console.set_overwriting(False)
        if self._bar:
            self._bar.update(**state)
        elif time.monotonic() > self._last_line + _SEC_BETWEEN_LINES:
            self._last_line = time.monotonic()
            console.say("{status}  step {completed}/{total}".format(**state))

    def _say(self, line: str, is_error: bool) -> None:
        if self._bar:
            self._bar.say(line)
        elif is_error:
            console.pass_on(sys.stderr, line)
        else:
            console.pass_on(sys.stdout, line)


class _Worker:
    """One worker's process, with threads that pass on what it says."""

    def __init__(
        self,
        command: list[str],
        environment: dict[str, str],
        cluster: Cluster,
        share: WorkerResources,
        show: Callable[[dict[str, Any]], None],
        say: Callable[[str, bool], None],
    ):
        self.index, self._say = cluster.index, say
        self._last_lines: collections.deque[str] = collections.deque(maxlen=_NUM_LAST_LINES)
        environment = {
            **environment,
            "TF_CONFIG": cluster.as_tf_config(),
            console.PART_VARIABLE: "1",
        }
        if share.gpus is not None:
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(share.gpus)
        progress, theirs = os.pipe()
        if cluster.is_chief:
            environment[PROGRESS_VARIABLE] = str(theirs)
        self.process = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            pass_fds=[theirs] if cluster.is_chief else [],
            start_new_session=True,  # Ctrl-C is ours to pass on.
            preexec_fn=lambda: _settle_in(share.cores),
        )
        os.close(theirs)
        self._threads = [
            threading.Thread(target=target, args=arguments, daemon=True)
            for target, arguments in (
                (self._read_lines, (self.process.stdout, False)),
                (self._read_lines, (self.process.stderr, True)),
                (_read_states, (progress, show)),
            )
        ]
        for thread in self._threads:
            thread.start()

    def _read_lines(self, stream: IO[bytes], is_error: bool) -> None:
        for line in stream:
            text = line.decode(errors="replace").rstrip("\n")
            self._last_lines.append(text)
            self._say(f"[{self.index}] {text}", is_error)

    @property
    def exit_code(self) -> int | None:
        """As a shell would tell it, 128 and more for a signal; None while it runs."""
        code = self.process.poll()
        return code if code is None or code >= 0 else 128 - code

    @property
    def is_stopped(self) -> bool:
        """Whether somebody has stopped the process, which is alive, but does nothing."""
        with contextlib.suppress(OSError, IndexError):
            stat = pathlib.Path(f"/proc/{self.process.pid}/stat").read_text(encoding="ascii")
            return stat.rpartition(")")[2].split()[0] in ("T", "t")
        return False

    def join(self) -> None:
        """Waits until all that it said has been passed on."""
        for thread in self._threads:
            thread.join(_SETTLE_SEC)

    def failure(self, exit_code: int, what: str) -> Failure:
        """Returns what to say of it."""
        return Failure(self.index, exit_code, what, list(self._last_lines))


def _settle_in(cores: Sequence[int]) -> None:
    """Runs in the child, before its program: limits its cores, and ties its life to ours."""
    signals.end_with_parent(signal.SIGKILL)
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, cores)


def _read_states(descriptor: int, show: Callable[[dict[str, Any]], None]) -> None:
    with open(descriptor, encoding="utf-8") as states:
        for line in states:
            show(json.loads(line))


def _find_culprit(workers: list[_Worker]) -> Failure:
    """Returns the failure that the others follow from: those that lost a peer are not to blame."""
    deadline = time.monotonic() + _SETTLE_SEC
    while True:
        ended = [(worker, code) for worker in workers if (code := worker.exit_code)]
        first = [(worker, code) for worker, code in ended if code not in _FOLLOWS]
        if first or time.monotonic() > deadline:
            break
        time.sleep(_POLL_SEC)
    for worker in workers:
        if worker.exit_code is None and worker.is_stopped and not first:
            return worker.failure(PeerLostError.exit_code, "was stopped and does not answer")
    culprit, code = min(first or ended, key=lambda end: end[1] >= _RETRY_FROM)
    culprit.join()
    killed = culprit.process.returncode < 0
    names = {int(number): number.name for number in signal.Signals}
    name = names.get(code - 128, f"signal {code - 128}")
    what = f"was ended by {name}" if killed else f"ended with code {code}"
    return culprit.failure(code, what)


def _tell(failure: Failure) -> None:
    console.warn(f"worker {failure.index} {failure.what}; the others are ended. Its last lines:")
    for line in failure.last_lines:
        console.pass_on(sys.stderr, f"    {line}")


def _reason(failure: Failure) -> str:
    """Returns the worker's own last word on what is wrong."""
    errors = [line for line in failure.last_lines if line.startswith("error: ")]
    return errors[-1].removeprefix("error: ") if errors else ""


def _is_port_in_use(failure: Failure) -> bool:
    return failure.exit_code == 2 and any(
        line.startswith("error: port ") for line in failure.last_lines
    )


def _ask_to_stop(workers: list[_Worker]) -> None:
    """Lets workers finish their call and save."""
    for worker in workers:
        if worker.exit_code is None:
            worker.process.send_signal(signals.STOP_REQUEST)
    deadline = time.monotonic() + _GRACE_SEC
    while any(worker.exit_code is None for worker in workers) and time.monotonic() < deadline:
        time.sleep(_POLL_SEC)


def _end(workers: list[_Worker]) -> None:
    """Kills what is left: what counts is on disk, and a worker in a collective hears no less."""
    for worker in workers:
        if worker.exit_code is None:
            worker.process.kill()
    for worker in workers:
        worker.process.wait()
        worker.join()
