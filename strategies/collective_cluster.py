"""Connects processes, on one machine or on many, by TensorFlow's own cluster engine.

What crosses between workers goes through the collectives that training uses, or, before those
can be trusted, through the key-value store of TensorFlow's coordination service.
"""

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.compiler.xla.tsl.protobuf import coordination_config_pb2 as coordination
from tensorflow.python.distribute.collective_all_reduce_strategy import CollectiveAllReduceExtended
from tensorflow.python.eager import context

from strategies.workers import Workers

_Communication = tf.distribute.experimental.CommunicationImplementation
IMPLEMENTATIONS = {"ring": _Communication.RING, "nccl": _Communication.NCCL}
_JOB = "worker"
_SHORT_BYTES = 1000  # A message up to this long takes one collective, a longer one two.
_HEARTBEAT_SEC = 10
# Each strategy of a process numbers its groups of devices from somewhere else: groups of different
# sizes under one number would break every collective after.
_KEY_BASES = itertools.count(start=0, step=100_000)


class _Extended(CollectiveAllReduceExtended):
    """TensorFlow's engine, on the devices that it is told."""

    def __init__(self, *arguments: Any, local_devices: Sequence[str], **options: Any):
        self._devices_asked = tuple(local_devices)
        super().__init__(*arguments, **options)

    def _initialize_local_devices(
        self, cluster_resolver: Any, worker_device: str
    ) -> tuple[tuple[str, ...], str]:
        # Its own version takes every GPU, or else one CPU, however many logical ones there are.
        kind = "GPU" if "GPU" in self._devices_asked[0] else "CPU"
        return tuple(worker_device + name for name in self._devices_asked), kind


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
        self._collective_key_base = next(_KEY_BASES)
        # `MultiWorkerMirroredStrategy.__init__` would make an engine of its own.
        tf.distribute.Strategy.__init__(
            self,
            _Extended(
                self,
                cluster_resolver=_resolver(addresses, index),
                communication_options=tf.distribute.experimental.CommunicationOptions(
                    implementation=IMPLEMENTATIONS[all_reduce]
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
        tf.train.ClusterSpec({_JOB: list(addresses)}),
        task_type=_JOB,
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
        context.context().configure_coordination_service(
            service_type="standalone",
            service_leader=f"/job:{_JOB}/replica:0/task:0",
            heartbeat_timeout_in_ms=_HEARTBEAT_SEC * 1000,  # Of a worker that is frozen.
            coordinated_jobs=[coordination.CoordinatedJob(name=_JOB, num_tasks=self.count)],
        )
        self.strategy = CollectiveStrategy(local_devices, all_reduce, addresses, index)
        self._num_local = len(local_devices)
        self._num_posted = itertools.count()

    def post(self, text: str) -> list[str]:
        """Returns what each worker posts, worker 0's first, without any collective.

        For what has to be known before a collective can work, as that all have as many devices.
        """
        number, store = next(self._num_posted), context.context()
        store.set_config_key_value(f"lockstep/{number}/{self.index}", text)
        return [store.get_config_key_value(f"lockstep/{number}/{i}") for i in range(self.count)]

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
