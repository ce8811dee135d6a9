"""Finds the worker whose failure made the others fail, and reports it."""

import signal
import sys
import time
from collections.abc import Sequence

from app.cluster.worker_process import Failure, WorkerProcess
from app.runtime import console
from app.runtime.errors import PeerLostError

RETRY_FROM = 128  # Lower exit codes are final.
_POLL_SEC = 0.1
_SETTLE_SEC = 2.0  # Time in which the original failure and its consequences are told apart.
# Exit codes of a worker that lost a peer: it reports the loss, or TensorFlow's native code aborts.
_FOLLOWS = (PeerLostError.exit_code, 128 + signal.SIGABRT)


def find_culprit(workers: Sequence[WorkerProcess]) -> Failure:
    """Returns the original failure, not that of a worker that lost a peer."""
    deadline = time.monotonic() + _SETTLE_SEC
    while True:
        ended = [worker for worker in workers if worker.exit_code]
        first = [worker for worker in ended if worker.exit_code not in _FOLLOWS]
        if first or time.monotonic() > deadline:
            break
        time.sleep(_POLL_SEC)
    for worker in workers:
        if worker.exit_code is None and worker.is_stopped and not first:
            return worker.failure(PeerLostError.exit_code, "was stopped and does not answer")
    culprit = min(first or ended, key=lambda worker: _code(worker) >= RETRY_FROM)
    culprit.join()
    code = _code(culprit)
    names = {int(number): number.name for number in signal.Signals}
    name = names.get(code - 128, f"signal {code - 128}")
    what = f"was ended by {name}" if culprit.process.was_killed else f"ended with code {code}"
    return culprit.failure(code, what)


def _code(worker: WorkerProcess) -> int:
    """Returns the exit code of an ended worker."""
    return worker.exit_code or 0


def print_failure(failure: Failure) -> None:
    """Prints a warning with the last lines of the failed worker."""
    console.warn(f"worker {failure.index} {failure.what}; the others are ended. Its last lines:")
    for line in failure.last_lines:
        console.pass_on(sys.stderr, f"    {line}")


def reason_of_worker(failure: Failure) -> str:
    """Returns the last error message that the worker printed, or ""."""
    errors = [line for line in failure.last_lines if line.startswith("error: ")]
    return errors[-1].removeprefix("error: ") if errors else ""


def is_port_in_use(failure: Failure) -> bool:
    """Returns whether a worker failed because its port is in use."""
    return failure.exit_code == 2 and any(
        line.startswith("error: port ") for line in failure.last_lines
    )
