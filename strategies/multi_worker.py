"""Data parallelism over processes with `tf.distribute.MultiWorkerMirroredStrategy`.

Each worker has one CPU device, or all its visible GPUs. Messages of the workers use the same
collectives as gradients.
"""

import contextlib

import numpy as np
import tensorflow as tf

from strategies.base import Workers
from strategies.mirrored import MirroredStrategy
from strategies.tf_private import post_key_value, wait_for_key_value

_Communication = tf.distribute.experimental.CommunicationImplementation
IMPLEMENTATIONS = {"ring": _Communication.RING, "nccl": _Communication.NCCL}
_SHORT_BYTES = 1000  # A message of up to this size takes one collective, a longer message two.
_LEAVE_SEC = 10.0  # The longest time that a worker waits for another worker to leave.


class MultiWorkerStrategy(MirroredStrategy):
    """Runs the step of `MirroredStrategy` on the replicas of several workers.

    Every worker reads the same global batches in the same order and trains on the shards of its own
    replicas, which are those of a single machine with as many replicas. TensorFlow packs all
    gradients into one collective over gRPC or NCCL, which costs a network round trip. Without
    `ClusterWorkers`, there is one worker.
    """

    name = "multi_worker"

    def default_all_reduce(self) -> str:
        """Returns "nccl" on GPUs, else "ring" over gRPC."""
        return "nccl" if "GPU" in self.devices[0] else "ring"

    def create_tf_strategy(self) -> tf.distribute.Strategy:
        """Returns the strategy that connects the workers, or one for a single worker."""
        if isinstance(self.workers, ClusterWorkers):
            return self.workers.tf_strategy
        strategy = create_tf_strategy(self.algorithm)
        if strategy.num_replicas_in_sync != self.num_replicas:
            raise ValueError(f"one worker has one CPU or all visible GPUs, got {self.devices}")
        return strategy


def create_tf_strategy(algorithm: str) -> tf.distribute.MultiWorkerMirroredStrategy:
    """Connects the workers of TF_CONFIG, if there is one; returns once all are connected."""
    # Without a limit for the bytes of a pack, all gradients are one.
    options = tf.distribute.experimental.CommunicationOptions(
        implementation=IMPLEMENTATIONS[algorithm]
    )
    return tf.distribute.MultiWorkerMirroredStrategy(communication_options=options)


class ClusterWorkers(Workers):
    """Connects the workers of TF_CONFIG. Create it before TensorFlow runs any operation.

    The constructor waits for all workers, has no timeout and lets no other thread of Python run.

    Attributes:
        addresses: "host:port" of every worker.
        tf_strategy: the `tf.distribute` strategy that connects the workers.
    """

    def __init__(self, algorithm: str):
        self.tf_strategy = create_tf_strategy(algorithm)
        resolver = self.tf_strategy.cluster_resolver
        self.addresses = resolver.cluster_spec().as_dict()["worker"]
        self.index, self.count = resolver.task_id, len(self.addresses)
        self._num_local = self.tf_strategy.num_replicas_in_sync // self.count

    def gather(self, message: bytes) -> list[bytes]:
        """Returns the messages of all workers, in order of workers."""
        fits = len(message) <= _SHORT_BYTES
        frames = self._gather_frames(message if fits else b"", len(message), _SHORT_BYTES)
        longest = max(length for length, _ in frames)
        if longest > _SHORT_BYTES:
            frames = self._gather_frames(message, len(message), longest)
        return [frame[:length] for length, frame in frames]

    def broadcast(self, message: bytes = b"") -> bytes:
        """Returns the chief's message; the other workers' arguments are ignored."""
        (length,) = np.frombuffer(self.gather(np.int64(len(message)).tobytes())[0], np.int64)
        if not length:
            return b""  # TensorFlow's ring all-reduce crashes on an empty tensor.
        own = message if self.is_chief else b""
        return self._sum(_to_words(own, int(length))).tobytes()[:length]

    def leave(self) -> None:
        """Waits a short time until no worker needs another one, for example to send a result on."""
        others = [index for index in range(self.count) if index != self.index]
        with contextlib.suppress(tf.errors.OpError):  # A lost worker needs no other worker.
            post_key_value(f"lockstep/done/{self.index}", "")
            for index in others:
                wait_for_key_value(f"lockstep/done/{index}", _LEAVE_SEC)
            if not self.is_chief:
                post_key_value(f"lockstep/left/{self.index}", "")
                return
            for index in others:  # The chief leaves last, because it keeps what is posted.
                wait_for_key_value(f"lockstep/left/{index}", _LEAVE_SEC)

    def _gather_frames(self, message: bytes, length: int, size: int) -> list[tuple[int, bytes]]:
        """Returns each worker's (length, message padded with zeros to `size`)."""
        words = _to_words(message, size)
        frames = np.zeros((self.count, 1 + len(words)), np.int64)
        frames[self.index, 0], frames[self.index, 1:] = length, words
        return [(int(row[0]), row[1:].tobytes()) for row in self._sum(frames)]

    def _sum(self, words: np.ndarray) -> np.ndarray:
        """Sums whole numbers over the workers; a broadcast if all but one worker pass 0."""
        return self._all_reduce(tf.constant(words)).numpy()

    @tf.function(autograph=False)
    def _all_reduce(self, words: tf.Tensor) -> tf.Tensor:
        def sum_over_workers() -> tf.Tensor:
            replica = tf.distribute.get_replica_context()
            # Only the first replica of a worker contributes.
            is_first = replica.replica_id_in_sync_group % self._num_local == 0
            return replica.all_reduce(tf.distribute.ReduceOp.SUM, tf.where(is_first, words, 0))

        per_replica = self.tf_strategy.run(sum_over_workers)
        return self.tf_strategy.experimental_local_results(per_replica)[0]


def _to_words(message: bytes, size: int) -> np.ndarray:
    """Returns a message, padded with zeros to `size` bytes, as 64-bit integers."""
    num_words = (size + 7) // 8
    return np.frombuffer(message.ljust(8 * num_words, b"\0"), np.int64)
