"""Starts the workers of a cluster on this machine and restarts all of them if one fails.

Does not need TensorFlow. The workers are ordinary `train` processes; the kernel kills them when
this process ends.
"""

import contextlib
import itertools
import signal
import sys
import time
from collections.abc import Sequence

from app.cluster.environment import Cluster, new_secret
from app.cluster.resource_split import WorkerResources, find_free_ports
from app.cluster.worker_failure import (
    RETRY_FROM,
    find_culprit,
    is_port_in_use,
    print_failure,
    reason_of_worker,
)
from app.cluster.worker_process import Failure, WorkerProcess
from app.config import LaunchConfig, TrainConfig
from app.runtime import console, signals
from app.runtime.errors import PeerLostError, Terminated, WorkerFailedError
from app.runtime.progress_bar import Bar
from app.runtime.subprocesses import child_environment, main_command
from app.runtime.temporary_directories import TemporaryDirectory

_POLL_SEC = 0.1
_GRACE_SEC = 60.0  # For workers that were asked to stop: one call and a checkpoint.
_LONGEST_PAUSE_SEC = 30.0
_SEC_BETWEEN_LINES = 15.0
_MAX_PORT_RETRIES = 5


class Launcher:
    """Trains with several processes on this machine.

    Args:
        config: options of `launch`, with a directory in `out`.
        shares: cores and GPUs of each worker.
    """

    def __init__(self, config: LaunchConfig, shares: Sequence[WorkerResources]):
        self._config, self._shares = config, shares
        self._has_begun = False  # Whether `--overwrite` has already been applied.
        self._bar = Bar() if sys.stdout.isatty() else None
        self._last_line = time.monotonic()

    def run(self) -> None:
        """Trains to completion; restarts all workers if one fails.

        Raises:
            WorkerFailedError: a worker failed with an error that a retry cannot fix.
            PeerLostError: workers failed more than `config.max_restarts` times.
        """
        most, port_retries = self._config.max_restarts, 0
        failures = itertools.count(1)
        while failure := self._attempt():
            print_failure(failure)
            if is_port_in_use(failure) and port_retries < _MAX_PORT_RETRIES:
                port_retries += 1
                continue
            if failure.exit_code < RETRY_FROM:
                raise WorkerFailedError(failure.index, failure.exit_code, reason_of_worker(failure))
            number = next(failures)
            if number > most:
                raise PeerLostError(
                    f"worker {failure.index} {failure.what}, after {console.count(most, 'restart')}"
                    " (--max_restarts); fix the error above and run the same command again to"
                    " resume from the last checkpoint"
                )
            pause_sec = min(2.0 ** (number - 1), _LONGEST_PAUSE_SEC)
            console.warn(
                f"restart {number} of {most}: all workers start again in {pause_sec:g} s, from the"
                " last checkpoint"
            )
            time.sleep(pause_sec)

    def _attempt(self) -> Failure | None:
        """Runs all workers once; when it returns, all have ended."""
        workers: list[WorkerProcess] = []
        with contextlib.ExitStack() as stack:
            if self._bar:
                self._bar.start()
                stack.callback(self._bar.stop)
            # Killed workers cannot remove the temporary files of TensorFlow.
            temporary = stack.enter_context(TemporaryDirectory())
            stack.callback(_end, workers)
            addresses = tuple(f"127.0.0.1:{port}" for port in find_free_ports(len(self._shares)))
            secret = new_secret()
            for index, share in enumerate(self._shares):
                cluster = Cluster(addresses, index, secret=secret)
                environment = child_environment(TMPDIR=temporary)
                command = self._command()
                workers.append(
                    WorkerProcess(command, environment, cluster, share, self._show, self._say)
                )
            stack.enter_context(signals.deferred())
            try:
                return self._watch(workers)
            except (KeyboardInterrupt, Terminated):
                _ask_to_stop(workers)
                raise

    def _command(self) -> list[str]:
        config = self._config
        flags = config.train_config().flags_for(TrainConfig)
        if self._has_begun:
            flags = [flag for flag in flags if not flag.startswith("--overwrite")]
        return main_command(["train", *flags, f"--out={config.out}"])

    def _watch(self, workers: Sequence[WorkerProcess]) -> Failure | None:
        """Waits until all workers have finished or one has failed."""
        first_end = None
        while True:
            signals.check()
            codes = [worker.exit_code for worker in workers]
            if any(codes):
                return find_culprit(workers)
            if all(code == 0 for code in codes):
                return None
            if 0 in codes:
                first_end = first_end or time.monotonic()
                if time.monotonic() - first_end > _GRACE_SEC:
                    index = codes.index(None)
                    return workers[index].failure(RETRY_FROM, "does not end")
            time.sleep(_POLL_SEC)

    def _show(self, state: dict) -> None:
        if not self._has_begun:
            self._has_begun = True
            console.set_overwriting(False)
        if self._bar:
            self._bar.update(**state)
        elif time.monotonic() > self._last_line + _SEC_BETWEEN_LINES:
            self._last_line = time.monotonic()
            console.say("[0] {status}  step {completed}/{total}".format(**state))

    def _say(self, line: str, is_error: bool) -> None:
        if self._bar:
            self._bar.say(line)
        elif is_error:
            console.pass_on(sys.stderr, line)
        else:
            console.pass_on(sys.stdout, line)


def _ask_to_stop(workers: Sequence[WorkerProcess]) -> None:
    """Asks workers to finish their call and save."""
    for worker in workers:
        if worker.exit_code is None:
            worker.process.ask_to_stop()
    deadline = time.monotonic() + _GRACE_SEC
    while any(worker.exit_code is None for worker in workers) and time.monotonic() < deadline:
        time.sleep(_POLL_SEC)


def _end(workers: Sequence[WorkerProcess]) -> None:
    """Kills the remaining workers; a worker in a collective does not respond to other signals."""
    for worker in workers:
        worker.process.signal(signal.SIGKILL)
    for worker in workers:
        worker.process.wait()
        worker.join()
