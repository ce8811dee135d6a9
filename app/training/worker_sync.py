"""Synchronises the workers of a training between steps: data, signals.

All workers call every function in the same order. Without a cluster, each returns immediately.
"""

from app.data.dataset import ImageDataset
from app.runtime import signals
from app.runtime.errors import DataError
from strategies.workers import Workers


def check_same_data(workers: Workers, dataset: ImageDataset) -> None:
    """Checks that every worker has loaded the same data.

    Raises:
        DataError: another worker has other data.
    """
    digest = dataset.sha256()
    for index, other in enumerate(workers.gather(digest.encode())):
        if other.decode() != digest:
            raise DataError(
                f"worker {workers.index} has data {dataset.name} with SHA-256 {digest[:12]}…, but"
                f" worker {index} has {other.decode()[:12]}…; use the same files on every worker"
            )


def synchronize(workers: Workers, *numbers: float) -> list[float]:
    """Synchronises values that depend on clocks and signals, between two calls.

    Returns:
        The maximum of each number over the workers.

    Raises:
        KeyboardInterrupt, Terminated: any worker has received a signal.
    """
    signal_number, *largest = workers.all_reduce_max(signals.requested(), *numbers)
    signals.check(int(signal_number))
    return largest


def wait_for_all(workers: Workers) -> None:
    """Waits for every worker, so that none exits before the chief has saved, or needs another."""
    workers.all_reduce_max(0)
    workers.leave()
