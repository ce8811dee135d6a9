"""Implements data parallelism over machines with `tf.distribute.MultiWorkerMirroredStrategy`."""

from collections.abc import Sequence
from typing import ClassVar

import tensorflow as tf

from strategies.mirrored import MirroredStrategy


def default_all_reduce(devices: Sequence[str]) -> str:
    """Returns the algorithm that "auto" stands for: "nccl" on GPUs, else "ring" over gRPC."""
    return "nccl" if "GPU" in devices[0] else "ring"


class MultiWorkerStrategy(MirroredStrategy):
    """Runs the step of `MirroredStrategy` on the replicas of several workers.

    Every worker reads the same global batches in the same order and trains on the shards of its own
    replicas. The shards are the same as on a single machine with as many replicas. TensorFlow's
    collectives sum the gradients, over gRPC or NCCL.

    Without a cluster, there is one worker.
    """

    name = "multi_worker"
    bucket_mib = 4096.0  # Fits all gradients: each collective costs a network round trip.
    device_kinds: ClassVar = {"nccl": "GPU"}

    def default_all_reduce(self) -> str:
        """Returns `default_all_reduce` of the devices."""
        return default_all_reduce(self.devices)

    def sum_buckets(self, buckets: list[tf.Tensor]) -> list[tf.Tensor]:
        """Sums buckets with one collective per bucket, in replica context."""
        context = tf.distribute.get_replica_context()
        return context.all_reduce(tf.distribute.ReduceOp.SUM, buckets)

    def create_tf_strategy(self) -> tf.distribute.Strategy:
        """Returns the strategy that connects the workers, or one for a single worker."""
        from strategies.collective_cluster import CollectiveStrategy

        return self.workers.strategy or CollectiveStrategy(self.devices, self.algorithm)
