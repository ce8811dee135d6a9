"""Collectives on per-replica lists: reduce-scatter, all-gather, and an all-reduce around a ring.

Each function takes lists with one entry per replica, works in a graph and eagerly, and places each
result on the device of its replica. `manual.py` has the simplest all-reduce.
"""

import functools
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

PerReplicaTensors = list[list[tf.Tensor]]


def shard_bounds(num_examples: Any, num_replicas: int, replica_id: Any) -> tuple[Any, Any]:
    """Returns the start and end of a replica's shard in a batch of `num_examples`.

    Shard sizes differ by at most one example; the first shards are the larger ones: 100 over 3 is
    34, 33, 33 and 4 over 3 is 2, 1, 1. (`experimental_distribute_dataset` rounds up: 2, 2, 0.)

    Args:
        num_examples: int or int scalar tensor.
        num_replicas: R, at least 1.
        replica_id: in 0 to R - 1, an int or an int scalar tensor.
    """
    size, larger_shards = num_examples // num_replicas, num_examples % num_replicas
    minimum = tf.minimum if tf.is_tensor(num_examples) else min
    start = replica_id * size + minimum(replica_id, larger_shards)
    end = (replica_id + 1) * size + minimum(replica_id + 1, larger_shards)
    return start, end


def add_in_order(tensors: Sequence[tf.Tensor]) -> tf.Tensor:
    """Adds tensors of one shape in order: ((a + b) + c) + d.

    `tf.add_n` is not used: its order depends on which of its inputs it may overwrite.
    """
    return functools.reduce(tf.add, tensors)


def split_rows(tensor: tf.Tensor, num_parts: int) -> list[tf.Tensor]:
    """Splits the rows of a tensor of known shape, as `shard_bounds`; parts may be empty."""
    bounds = [shard_bounds(tensor.shape[0], num_parts, part) for part in range(num_parts)]
    return tf.split(tensor, [end - start for start, end in bounds])


def reduce_scatter(
    per_replica_tensors: PerReplicaTensors, devices: Sequence[str]
) -> PerReplicaTensors:
    """Sums tensors over the replicas, in order, and gives each device its rows of each sum.

    With S bytes per replica, (R - 1) * S bytes are sent in all.

    Args:
        per_replica_tensors: R lists of V tensors; item [r][v] is on device r.
        devices: R device names.

    Returns:
        R lists of V tensors; item [r][v] is part r of the rows of sum v, on device r.
    """
    per_replica_parts = []
    for device, tensors in zip(devices, per_replica_tensors, strict=True):
        with tf.device(device):  # Split on the source device, so that only the parts are sent.
            per_replica_parts.append([split_rows(tensor, len(devices)) for tensor in tensors])
    per_device_sums = []
    for part, device in enumerate(devices):
        with tf.device(device):
            per_device_sums.append([
                add_in_order([parts[part] for parts in copies])
                for copies in zip(*per_replica_parts, strict=True)
            ])  # fmt: skip
    return per_device_sums


def all_gather(per_device_parts: PerReplicaTensors, devices: Sequence[str]) -> PerReplicaTensors:
    """Joins the parts of each tensor on every device: (R - 1) * S bytes in all.

    Args:
        per_device_parts: R lists of V tensors; item [r][v] is part r of the rows of tensor v.
        devices: R device names.

    Returns:
        R lists of V whole tensors; item [r][v] is on device r and bitwise identical for every r.
    """
    per_device_wholes = []
    for device in devices:
        with tf.device(device):
            wholes = [tf.concat(parts, axis=0) for parts in zip(*per_device_parts, strict=True)]
        per_device_wholes.append(wholes)
    return per_device_wholes


def ring(per_replica_tensors: PerReplicaTensors, devices: Sequence[str]) -> PerReplicaTensors:
    """Sums chunks around a ring in R − 1 steps, then sends the totals around in R − 1 steps.

    With S bytes per replica, each connection carries 2 · (R − 1) / R · S bytes, the least possible.
    With many devices, the number of steps dominates the cost.

    Reference: P. Patarasuk and X. Yuan, "Bandwidth optimal all-reduce algorithms for clusters of
        workstations", 2009.
    """
    num_replicas, chunks = len(devices), []
    for device, tensors in zip(devices, per_replica_tensors, strict=True):
        with tf.device(device):
            parts = [split_rows(tf.reshape(tensor, [-1]), num_replicas) for tensor in tensors]
        chunks.append([list(chunk) for chunk in zip(*parts, strict=True)])
    # Reduce-scatter: replica r adds its own chunk to the partial sum of replica r − 1.
    for step in range(1, num_replicas):
        for r, device in enumerate(devices):
            c = (r - step) % num_replicas
            with tf.device(device):
                chunks[r][c] = [
                    so_far + own for so_far, own in zip(chunks[r - 1][c], chunks[r][c], strict=True)
                ]
    # All-gather: replica r now has the total of chunk r + 1; each total travels around the ring.
    for step in range(1, num_replicas):
        for r, device in enumerate(devices):
            c = (r + 1 - step) % num_replicas
            with tf.device(device):
                chunks[r][c] = [tf.identity(total) for total in chunks[r - 1][c]]
    sums = []
    for device, own_chunks, tensors in zip(devices, chunks, per_replica_tensors, strict=True):
        with tf.device(device):
            wholes = [tf.concat(parts, axis=0) for parts in zip(*own_chunks, strict=True)]
            sums.append([tf.reshape(w, t.shape) for w, t in zip(wholes, tensors, strict=True)])
    return sums
