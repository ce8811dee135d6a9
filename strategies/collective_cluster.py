"""Connects processes, on one machine or on many, by TensorFlow's own cluster engine.

What crosses between workers goes through the collectives that training uses, or, before those
can be trusted, through the key-value store of TensorFlow's coordination service.
"""

import itertools
from collections.abc import Sequence

import numpy as np
import tensorflow as tf

from strategies import tf_private
from strategies.workers import Workers

_Communication = tf.distribute.experimental.CommunicationImplementation
IMPLEMENTATIONS = {
    "ring": _Communication.RING,
    "nccl": _Communication.NCCL,
}
_SHORT_BYTES = 1000  # A message up to this long takes one collective, a longer one two.
_HEARTBEAT_SEC = 10
# Each strategy of a process numbers its groups of devices from somewhere else: groups of different
# sizes under one number would break every collective after.
_KEY_BASES = itertools.count(start=0, step=100_000)


class CollectiveStrategy(tf.distribute.MultiWorkerMirroredStrategy):
    """`tf.distribute.MultiWorkerMirroredStrategy` on any devices of each worker.

    Args:
        local_devices: of this worker, for example `["/device:CPU:0", "/device:CPU:1"]`.
        all_reduce: a key of `IMPLEMENTATIONS`.
        addresses: "host:port" of every worker, the chief first; none for one worker without any.
        index: which of them is this process.
    """

    def __init__(
        self,
        local_devices: Sequence[str],
        all_reduce: str,
        addresses: Sequence[str] = (),
        index: int = 0,
    ):
        tf_private.set_collective_key_base(self, next(_KEY_BASES))
        # `MultiWorkerMirroredStrategy.__init__` would make an engine of its own.
        tf.distribute.Strategy.__init__(
            self,
            tf_private.create_collective_extended(
                self,
                cluster_resolver=_resolver(addresses, index),
                communication_options=tf.distribute.experimental.CommunicationOptions(
                    implementation=IMPLEMENTATIONS.get(all_reduce, _Communication.AUTO)
                ),
                local_devices=local_devices,
            ),
        )


def _resolver(
    addresses: Sequence[str], index: int
) -> tf.distribute.cluster_resolver.ClusterResolver:
    if not addresses:
        return tf.distribute.cluster_resolver.SimpleClusterResolver(tf.train.ClusterSpec({}))
    return tf.distribute.cluster_resolver.SimpleClusterResolver(
        tf.train.ClusterSpec({tf_private.JOB: list(addresses)}),
        task_type=tf_private.JOB,
        task_id=index,
        rpc_layer="grpc",
    )


class ClusterWorkers(Workers):
    """Several processes, connected; to be made before TensorFlow computes anything.

    Returns when all of them have come, however long that takes.

    Args:
        addresses: "host:port" of every worker, the chief first.
        index: of this one.
        local_devices: on which this worker has a replica each.
        all_reduce: a key of `IMPLEMENTATIONS`.

    Attributes:
        strategy: what connects them.

    Raises:
        tf.errors.OpError: the cluster cannot be formed.
    """

    strategy: CollectiveStrategy

    def __init__(
        self, addresses: Sequence[str], index: int, local_devices: Sequence[str], all_reduce: str
    ):
        self.index, self.count = index, len(addresses)
        tf_private.configure_coordination_service(
            num_workers=self.count, heartbeat_sec=_HEARTBEAT_SEC
        )
        self.strategy = CollectiveStrategy(local_devices, all_reduce, addresses, index)
        self._num_local = len(local_devices)
        self._num_posted = itertools.count()

    def post(self, text: str) -> list[str]:
        """Returns what each worker posts, worker 0's first, without any collective.

        For what has to be known before a collective can work, as that all have as many devices.
        """
        prefix = f"lockstep/{next(self._num_posted)}"
        tf_private.post_key_value(f"{prefix}/{self.index}", text)
        return [tf_private.wait_for_key_value(f"{prefix}/{i}") for i in range(self.count)]

    def gather(self, message: bytes) -> list[bytes]:
        """Returns what each worker said, worker 0 first."""
        fits = len(message) <= _SHORT_BYTES
        frames = self._gather_frames(message if fits else b"", len(message), _SHORT_BYTES)
        lengths = [length for length, _ in frames]
        if max(lengths) > _SHORT_BYTES:
            frames = self._gather_frames(message, len(message), max(lengths))
        return [frame[:length] for length, frame in frames]

    def broadcast(self, message: bytes = b"") -> bytes:
        """Returns what the chief said; what others pass is not looked at."""
        (length,) = np.frombuffer(self.gather(np.int64(len(message)).tobytes())[0], np.int64)
        if not length:
            return b""  # TensorFlow's ring dies of an empty tensor.
        total = self._sum(_to_words(message if self.is_chief else b"", int(length)))
        return total.tobytes()[:length]

    def _gather_frames(self, message: bytes, length: int, size: int) -> list[tuple[int, bytes]]:
        """Returns (length, message and zeros up to `size`) of each worker."""
        frame = np.concatenate([[length], _to_words(message, size)])
        frames = np.zeros((self.count, len(frame)), np.int64)
        frames[self.index] = frame
        return [(int(row[0]), row[1:].tobytes()) for row in self._sum(frames)]

    def _sum(self, words: np.ndarray) -> np.ndarray:
        """Adds whole numbers over the workers; where all but one send 0 it is that one's."""
        return self._all_reduce(tf.constant(words)).numpy()

    @tf.function
    def _all_reduce(self, words: tf.Tensor) -> tf.Tensor:
        def sum_over_workers() -> tf.Tensor:
            replica = tf.distribute.get_replica_context()
            # The first replica of a worker speaks for it.
            speaks = replica.replica_id_in_sync_group % self._num_local == 0
            own = words if speaks else tf.zeros_like(words)
            return replica.all_reduce(tf.distribute.ReduceOp.SUM, own)

        return self.strategy.experimental_local_results(self.strategy.run(sum_over_workers))[0]


def _to_words(message: bytes, size: int) -> np.ndarray:
    """Returns a message, and zeros up to `size` bytes, as 64-bit numbers."""
    num_words = -(-size // 8)
    return np.frombuffer(message.ljust(8 * num_words, b"\0"), np.int64)
