"""Connects processes, on one or several machines, with TensorFlow's collectives.

Workers communicate through the same collectives as training. Before the collectives work, they use
the key-value store of TensorFlow's coordination service.
"""

import contextlib
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
# A message of up to this size takes one collective, a longer message two.
_SHORT_BYTES = 1000
# A worker without a heartbeat for this time counts as lost; a shorter network failure is harmless.
_HEARTBEAT_SEC = 20
# The longest time that a worker waits for another worker to leave.
_LEAVE_SEC = 10.0
# The number of the first group of devices of each strategy of this process. Two groups of different
# sizes with one number would break every later collective.
_KEY_BASES = itertools.count(start=0, step=100_000)


class CollectiveStrategy(tf.distribute.MultiWorkerMirroredStrategy):
    """`tf.distribute.MultiWorkerMirroredStrategy` on any devices of each worker.

    Args:
        local_devices: of this worker, for example `["/device:CPU:0", "/device:CPU:1"]`.
        all_reduce: a key of `IMPLEMENTATIONS`.
        addresses: "host:port" of every worker, the chief first; empty for a single worker.
        index: index of this process in `addresses`.
    """

    def __init__(
        self,
        local_devices: Sequence[str],
        all_reduce: str,
        addresses: Sequence[str] = (),
        index: int = 0,
    ):
        tf_private.set_collective_key_base(self, next(_KEY_BASES))
        # `MultiWorkerMirroredStrategy.__init__` would create another extended object.
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
    """Connects several worker processes. Create it before TensorFlow runs any operation.

    The constructor returns once all workers are connected; it has no timeout.

    Args:
        addresses: "host:port" of every worker, the chief first.
        index: index of this worker.
        local_devices: devices of this worker, one replica on each.
        all_reduce: a key of `IMPLEMENTATIONS`.

    Attributes:
        strategy: the `tf.distribute` strategy that connects the workers.

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

    def leave(self) -> None:
        """Waits until no worker needs another one, so that each can end; gives up soon.

        A worker that has the result of a collective may still have to send it on. The chief leaves
        last, because it keeps what is posted.
        """
        others = [index for index in range(self.count) if index != self.index]
        with contextlib.suppress(tf.errors.OpError):  # A lost worker needs no other worker.
            tf_private.post_key_value(f"lockstep/done/{self.index}", "")
            for index in others:
                tf_private.wait_for_key_value(f"lockstep/done/{index}", _LEAVE_SEC)
            if not self.is_chief:
                tf_private.post_key_value(f"lockstep/left/{self.index}", "")
                return
            for index in others:
                tf_private.wait_for_key_value(f"lockstep/left/{index}", _LEAVE_SEC)

    def gather(self, message: bytes) -> list[bytes]:
        """Returns the messages of all workers, in order of workers."""
        fits = len(message) <= _SHORT_BYTES
        frames = self._gather_frames(message if fits else b"", len(message), _SHORT_BYTES)
        lengths = [length for length, _ in frames]
        if max(lengths) > _SHORT_BYTES:
            frames = self._gather_frames(message, len(message), max(lengths))
        return [frame[:length] for length, frame in frames]

    def broadcast(self, message: bytes = b"") -> bytes:
        """Returns the chief's message; the other workers' arguments are ignored."""
        (length,) = np.frombuffer(self.gather(np.int64(len(message)).tobytes())[0], np.int64)
        if not length:
            return b""  # TensorFlow's ring all-reduce crashes on an empty tensor.
        total = self._sum(_to_words(message if self.is_chief else b"", int(length)))
        return total.tobytes()[:length]

    def _gather_frames(self, message: bytes, length: int, size: int) -> list[tuple[int, bytes]]:
        """Returns each worker's (length, message padded with zeros to `size`)."""
        frame = np.concatenate([[length], _to_words(message, size)])
        frames = np.zeros((self.count, len(frame)), np.int64)
        frames[self.index] = frame
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
            own = tf.where(is_first, words, 0)
            return replica.all_reduce(tf.distribute.ReduceOp.SUM, own)

        return self.strategy.experimental_local_results(self.strategy.run(sum_over_workers))[0]


def _to_words(message: bytes, size: int) -> np.ndarray:
    """Returns a message, padded with zeros to `size` bytes, as 64-bit integers."""
    num_words = (size + 7) // 8
    return np.frombuffer(message.ljust(8 * num_words, b"\0"), np.int64)
