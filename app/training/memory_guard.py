"""Ends a training whose batch does not fit into memory, in one line that names the batch."""

import contextlib
from collections.abc import Callable, Iterator

from app.runtime import console
from app.runtime.errors import DeviceError, memory_error


@contextlib.contextmanager
def naming_out_of_memory(
    global_batch_size: int, num_replicas: int, is_within_epoch: Callable[[], bool]
) -> Iterator[None]:
    """Converts out-of-memory errors of an epoch to an error that names the batch.

    Args:
        global_batch_size: size of the largest batch.
        num_replicas: number of replicas that share it.
        is_within_epoch: returns whether steps are being trained, not the test set evaluated.

    Raises:
        DeviceError: a step ran out of memory.
    """
    try:
        yield
    except Exception as error:
        if memory_error(error) and is_within_epoch():
            half = global_batch_size // 2 // num_replicas * num_replicas
            advice = (
                f"use --global_batch_size={half} or less"
                if half
                else "use fewer devices or a machine with more memory"
            )
            raise DeviceError(
                f"out of memory: --global_batch_size={global_batch_size}, which is"
                f" {-(-global_batch_size // num_replicas):,} images on each of"
                f" {console.count(num_replicas, 'replica')}, does not fit; {advice}"
            ) from error
        raise
