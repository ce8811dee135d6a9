"""The processes that train together, as each of them sees the others.

A strategy on one machine is one process, and `Workers` is all that it needs. Where there are
several, `strategies/collective_cluster.py` connects them.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:  # One process alone needs no TensorFlow.
    import tensorflow as tf


class Workers:
    """This process, alone.

    Every method is called by all workers, in the same order, and returns the same on each.

    Attributes:
        index: of this one; 0 is the chief, which writes what there is to write.
        count: how many there are.
        strategy: the `tf.distribute` strategy that connects them; None without any cluster.
    """

    index = 0
    count = 1
    strategy: "tf.distribute.Strategy | None" = None

    @property
    def is_chief(self) -> bool:
        """Whether this is worker 0."""
        return self.index == 0

    def gather(self, message: bytes) -> list[bytes]:
        """Returns what each worker said, worker 0 first."""
        return [message]

    def broadcast(self, message: bytes = b"") -> bytes:
        """Returns what the chief said; what others pass is not looked at."""
        return message

    def all_reduce_max(self, *numbers: float) -> list[float]:
        """Returns the largest of what the workers say, number by number.

        What depends on a clock, or on a signal, differs between processes: this settles it.
        """
        said = [np.frombuffer(text) for text in self.gather(np.array(numbers, float).tobytes())]
        return np.max(said, axis=0).tolist()

    def gather_arrays(self, arrays: Sequence[np.ndarray]) -> list[list[np.ndarray]]:
        """Returns each worker's arrays, worker 0's first; all have those shapes and dtypes."""
        if self.count == 1:
            return [list(arrays)]
        messages = self.gather(b"".join(array.tobytes() for array in arrays))
        return [split_bytes(message, arrays) for message in messages]


def split_bytes(message: bytes, likes: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Returns the arrays whose bytes, one after another, are a message.

    Args:
        message: the bytes.
        likes: arrays of the same shapes and dtypes.

    Raises:
        ValueError: it has another length.
    """
    ends = np.cumsum([like.nbytes for like in likes], dtype=np.int64).tolist()
    if len(message) != (ends[-1] if ends else 0):
        raise ValueError(f"{len(message)} bytes instead of {ends[-1] if ends else 0}")
    return [
        np.frombuffer(message[end - like.nbytes : end], like.dtype).reshape(like.shape)
        for like, end in zip(likes, ends, strict=True)
    ]
