"""Collectives on per-replica lists, written to be read.

Everything here works on lists with one entry for each replica, inside a compiled graph or outside
of it, and places each result on the device of the replica that it is for.
"""

import functools
from collections.abc import Callable, Sequence

import tensorflow as tf

PerReplicaTensors = list[list[tf.Tensor]]


def shard_bounds(num_examples, num_replicas: int, replica_id: int):
    """Returns where the shard of a replica starts and ends in a batch of `num_examples`.

    Shards differ by at most one example, the first ones being the larger: 100 over 3 is 34, 33, 33
    and 4 over 3 is 2, 1, 1. (Rounding up instead, as `experimental_distribute_dataset` does, makes
    2, 2, 0 of the latter.)

    Args:
        num_examples: int or int scalar tensor.
        num_replicas: R, at least 1.
        replica_id: in 0 to R - 1.
    """
    size, larger_shards = num_examples // num_replicas, num_examples % num_replicas
    minimum = tf.minimum if tf.is_tensor(num_examples) else min
    start = replica_id * size + minimum(replica_id, larger_shards)
    end = (replica_id + 1) * size + minimum(replica_id + 1, larger_shards)
    return start, end


def split_batch(batch: Sequence[tf.Tensor], devices: Sequence[str]) -> list[tuple[tf.Tensor, ...]]:
    """Cuts a global batch into one shard for each replica, in order, each on its own device.

    Args:
        batch: tensors of shape `(n, ...)` with the same n, for example images and labels.
        devices: R device names.

    Returns:
        R tuples; item [r] holds rows `shard_bounds(n, R, r)` of each tensor, on device r.
    """
    num_examples = tf.shape(batch[0])[0]
    shards = []
    for replica_id, device in enumerate(devices):
        start, end = shard_bounds(num_examples, len(devices), replica_id)
        shard = [tensor[start:end] for tensor in batch]
        with tf.device(device):
            shards.append(tuple(tf.identity(part) for part in shard))
    return shards


def broadcast(tensors: Sequence[tf.Tensor], devices: Sequence[str]) -> PerReplicaTensors:
    """Copies V tensors to each of R devices; returns R lists of V tensors."""
    per_replica_copies = []
    for device in devices:
        with tf.device(device):
            per_replica_copies.append([tf.identity(tensor) for tensor in tensors])
    return per_replica_copies


def add_in_order(copies: Sequence[tf.Tensor]) -> tf.Tensor:
    """Adds tensors of one shape from the first to the last: ((a + b) + c) + d.

    Not `tf.add_n`, whose order depends on which of its inputs it may overwrite.
    """
    return functools.reduce(tf.add, copies)


def sum_on_one(per_replica_tensors: PerReplicaTensors, devices: Sequence[str]) -> PerReplicaTensors:
    """Adds on the first device, in replica order, and copies the totals back to all.

    2 · (R − 1) copies of each of V tensors, all of them through one device, in two steps. Simple
    rather than fast: the book's algorithm.

    Reference: the plan of `tf.distribute.ReductionToOneDevice`.
    """
    with tf.device(devices[0]):
        totals = [add_in_order(copies) for copies in zip(*per_replica_tensors, strict=True)]
    return broadcast(totals, devices)


ALL_REDUCE_ALGORITHMS: dict[str, Callable[..., PerReplicaTensors]] = {"sum_on_one": sum_on_one}


def all_reduce(
    per_replica_tensors: PerReplicaTensors,
    devices: Sequence[str],
    *,
    algorithm: str = "sum_on_one",
) -> PerReplicaTensors:
    """Adds each tensor over all replicas and gives every replica the total.

    Args:
        per_replica_tensors: R lists of V tensors; item [r][v] sits on device r and has the same
            shape for every r. Left unchanged.
        devices: R device names.
        algorithm: a key of `ALL_REDUCE_ALGORITHMS`.

    Returns:
        R lists of V tensors, placed like the input; item [r][v] is the same total for every r,
        bit for bit.

    Raises:
        ValueError: replicas and devices differ in number, replicas disagree on V or on a shape,
            or there is no such algorithm.
    """
    if not per_replica_tensors or len(per_replica_tensors) != len(devices):
        raise ValueError(
            f"{len(per_replica_tensors)} lists of tensors for {len(devices)} devices"
            " — one list for each replica is required"
        )
    if algorithm not in ALL_REDUCE_ALGORITHMS:
        raise ValueError(f"all_reduce={algorithm!r} — one of {', '.join(ALL_REDUCE_ALGORITHMS)}")
    for copies in zip(*per_replica_tensors, strict=True):
        shapes = {str(copy.shape) for copy in copies}
        if len(shapes) > 1:
            raise ValueError(f"replicas disagree on a shape: {' and '.join(sorted(shapes))}")
    if len(devices) == 1:
        return [list(per_replica_tensors[0])]
    return ALL_REDUCE_ALGORITHMS[algorithm](per_replica_tensors, devices)
