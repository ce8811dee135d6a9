"""Defines how the worker processes of a training communicate.

A strategy on one machine is a single process and uses `Workers`. For several processes,
`strategies/collective_cluster.py` connects them.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:  # A single process needs no TensorFlow.
    import tensorflow as tf


class Workers:
    """Represents the workers of a training; this class is for a single process.

    All workers call every method in the same order, and it returns the same result on each.

    Attributes:
        index: index of this worker; 0 is the chief, which writes all files.
        count: number of workers.
        strategy: the `tf.distribute` strategy that connects the workers; None without a cluster.
    """

    index = 0
    count = 1
    strategy: "tf.distribute.Strategy | None" = None

    @property
    def is_chief(self) -> bool:
        """Whether this is worker 0."""
        return self.index == 0

    def local_range(self, count: int) -> range:
        """Returns this worker's part of `count` numbered items; all workers have as many.

        Raises:
            ValueError: the items cannot be divided equally.
        """
        num_local, rest = divmod(count, self.count)
        if rest:
            raise ValueError(f"{count} cannot be divided among {self.count} workers")
        return range(self.index * num_local, (self.index + 1) * num_local)

    def gather(self, message: bytes) -> list[bytes]:
        """Returns the messages of all workers, in order of workers."""
        return [message]

    def broadcast(self, message: bytes = b"") -> bytes:
        """Returns the chief's message; the other workers' arguments are ignored."""
        return message

    def all_reduce_max(self, *numbers: float) -> list[float]:
        """Returns the elementwise maximum of the workers' numbers.

        Lets all workers act alike on values that differ between processes, such as clocks and
        received signals.
        """
        messages = self.gather(np.array(numbers, float).tobytes())
        return np.max([np.frombuffer(message) for message in messages], axis=0).tolist()

    def leave(self) -> None:
        """Waits until no worker needs another one, so that each can end; gives up soon."""

    def gather_arrays(self, arrays: Sequence[np.ndarray]) -> list[list[np.ndarray]]:
        """Returns the arrays of all workers, in order; shapes and dtypes must be the same."""
        if self.count == 1:
            return [list(arrays)]
        messages = self.gather(b"".join(array.tobytes() for array in arrays))
        return [split_bytes(message, arrays) for message in messages]


def split_bytes(message: bytes, likes: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Splits the concatenated bytes of arrays into the arrays.

    Args:
        message: the bytes.
        likes: arrays with the shapes and dtypes of the result.

    Raises:
        ValueError: the message has the wrong length.
    """
    ends = np.cumsum([like.nbytes for like in likes], dtype=np.int64).tolist()
    if len(message) != (ends[-1] if ends else 0):
        raise ValueError(f"{len(message)} bytes instead of {ends[-1] if ends else 0}")
    return [
        np.frombuffer(message[end - like.nbytes : end], like.dtype).reshape(like.shape)
        for like, end in zip(likes, ends, strict=True)
    ]
