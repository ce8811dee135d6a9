"""Implements collectives on per-replica lists: scatter, reduce-scatter, all-gather, all-reduce.

Each function takes lists with one entry per replica, works in a graph and eagerly, and places each
result on the device of its replica. `strategies/manual.py` has the simplest all-reduce.
"""

import functools
import itertools
from collections.abc import Callable, Iterable, Sequence

import tensorflow as tf

PerReplicaTensors = list[list[tf.Tensor]]


def shard_bounds(
    num_examples: int | tf.Tensor, num_replicas: int, replica_id: int | tf.Tensor
) -> tuple[int | tf.Tensor, int | tf.Tensor]:
    """Returns the start and end of a replica's shard in a batch of `num_examples`.

    Shard sizes differ by at most one example; the first shards are the larger ones: 100 over 3 is
    34, 33, 33 and 4 over 3 is 2, 1, 1. (`experimental_distribute_dataset` rounds up: 2, 2, 0.)

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


def shard_sizes(num_examples: int, num_replicas: int) -> list[int]:
    """Returns the per-replica shard sizes of a batch."""
    bounds = [shard_bounds(num_examples, num_replicas, r) for r in range(num_replicas)]
    return [end - start for start, end in bounds]


def weighted_bounds(
    num_examples: int | tf.Tensor, weights: Sequence[int], shard_id: int | tf.Tensor
) -> tuple[int | tf.Tensor, int | tf.Tensor]:
    """Returns the start and end of a shard in a batch that is split in proportion to weights.

    The batch is split into sum(weights) equal units, and a shard of weight w takes w consecutive
    units: 100 examples with weights 3, 1 give 75, 25. Equal weights of 1 give `shard_bounds`.

    Args:
        num_examples: int or int scalar tensor.
        weights: relative sizes of the shards, whole numbers of at least 1.
        shard_id: int or int scalar tensor.
    """
    ends = list(itertools.accumulate(weights))
    if tf.is_tensor(shard_id):
        end = tf.gather(tf.constant(ends), shard_id)
        first = end - tf.gather(tf.constant(list(weights)), shard_id)
    else:
        end, first = ends[shard_id], ends[shard_id] - weights[shard_id]
    first_row, _ = shard_bounds(num_examples, ends[-1], first)
    end_row, _ = shard_bounds(num_examples, ends[-1], end)
    return first_row, end_row


def add_in_order(copies: Sequence[tf.Tensor]) -> tf.Tensor:
    """Adds tensors of one shape in order: ((a + b) + c) + d.

    `tf.add_n` is not used: its order depends on which of its inputs it may overwrite.
    """
    return functools.reduce(tf.add, copies)


def scatter(
    batch: Sequence[tf.Tensor], devices: Sequence[str], bounds: Sequence[tuple]
) -> list[tuple[tf.Tensor, ...]]:
    """Copies rows start to end of each tensor of a batch to each device.

    Args:
        batch: tensors `(n, ...)` with the same n, for example images and labels.
        devices: R device names.
        bounds: R pairs of start and end.
    """
    shards = []
    for device, (start, end) in zip(devices, bounds, strict=True):
        rows = [tensor[start:end] for tensor in batch]  # Only these rows are sent.
        with tf.device(device):
            shards.append(tuple(tf.identity(tensor) for tensor in rows))
    return shards


def part_of(tensor: tf.Tensor, part_id: int, num_parts: int) -> tf.Tensor:
    """Returns one part of a flattened tensor, with the bounds of `shard_bounds`."""
    flat = tf.reshape(tensor, [-1])
    start, end = shard_bounds(flat.shape[0], num_parts, part_id)
    return flat[start:end]


def cut_in_parts(
    per_replica_tensors: PerReplicaTensors, devices: Sequence[str]
) -> list[PerReplicaTensors]:
    """Cuts each tensor into R flat parts, some of which may be empty.

    Returns:
        Item [r][c][v] is part c of tensor v of replica r, on device r.
    """
    num_parts, per_replica_parts = len(devices), []
    for device, tensors in zip(devices, per_replica_tensors, strict=True):
        parts_of_each = []
        with tf.device(device):  # Cut on the source device, so that only the parts are sent.
            for tensor in tensors:
                sizes = shard_sizes(tensor.shape.num_elements(), num_parts)
                parts_of_each.append(tf.split(tf.reshape(tensor, [-1]), sizes))
        per_replica_parts.append([[parts[c] for parts in parts_of_each] for c in range(num_parts)])
    return per_replica_parts


def reduce_scatter(
    per_replica_tensors: PerReplicaTensors, devices: Sequence[str]
) -> PerReplicaTensors:
    """Sums tensors over the replicas, in order, and returns to each device its part of each sum.

    Every device sends one part of each tensor to every other one: (R - 1) * S bytes in all.

    Args:
        per_replica_tensors: R lists of V tensors; item [r][v] is on device r.
        devices: R device names.

    Returns:
        R lists of V flat tensors; item [r][v] is part r of sum v, on device r.
    """
    per_replica_parts = cut_in_parts(per_replica_tensors, devices)
    per_device_sums = []
    for c, device in enumerate(devices):
        copies_of_each = zip(*(parts[c] for parts in per_replica_parts), strict=True)
        with tf.device(device):
            per_device_sums.append([add_in_order(copies) for copies in copies_of_each])
    return per_device_sums


def all_gather(
    per_device_parts: PerReplicaTensors, shapes: Iterable[Sequence[int]], devices: Sequence[str]
) -> PerReplicaTensors:
    """Joins the parts of each tensor on every device: (R - 1) * S bytes in all.

    Args:
        per_device_parts: R lists of V flat tensors; item [r][v] is part r of tensor v.
        shapes: shapes of the V whole tensors.
        devices: R device names.

    Returns:
        R lists of V whole tensors; item [r][v] is on device r and bitwise identical for every r.
    """
    shapes = list(shapes)
    per_device_wholes = []
    for device in devices:
        with tf.device(device):
            per_device_wholes.append(join_parts(per_device_parts, shapes))
    return per_device_wholes


def join_parts(parts: PerReplicaTensors, shapes: Sequence[Sequence[int]]) -> list[tf.Tensor]:
    """Joins R lists of flat parts to V tensors of the given shapes, on the current device."""
    wholes = [tf.concat(parts_of_each, axis=0) for parts_of_each in zip(*parts, strict=True)]
    return [tf.reshape(whole, shape) for whole, shape in zip(wholes, shapes, strict=True)]


def tree(per_replica_tensors: PerReplicaTensors, devices: Sequence[str]) -> PerReplicaTensors:
    """Sums up a binary tree of replicas and copies the totals back down the same tree.

    Takes 2 · ⌈log₂ R⌉ steps of whole tensors: the first device receives and sends ⌈log₂ R⌉ · S
    bytes. Suits small tensors on many devices, where the number of steps dominates the cost.

    Reference: the binomial trees of R. Thakur et al., "Optimization of Collective Communication
        Operations in MPICH", 2005.
    """
    num_replicas = len(devices)
    sums = [list(tensors) for tensors in per_replica_tensors]
    distances = [2**i for i in range((num_replicas - 1).bit_length())]
    for distance in distances:
        for r in range(0, num_replicas - distance, 2 * distance):
            with tf.device(devices[r]):
                sums[r] = [a + b for a, b in zip(sums[r], sums[r + distance], strict=True)]
    for distance in reversed(distances):
        for r in range(0, num_replicas - distance, 2 * distance):
            with tf.device(devices[r + distance]):
                sums[r + distance] = [tf.identity(total) for total in sums[r]]
    return sums


def ring(per_replica_tensors: PerReplicaTensors, devices: Sequence[str]) -> PerReplicaTensors:
    """Sums chunks around a ring in R − 1 steps, then sends the totals around in R − 1 steps.

    In each of the 2 · (R − 1) steps every replica sends S / R bytes to the next. Each connection
    therefore carries 2 · (R − 1) / R · S bytes, the least possible. Suits large tensors; with many
    devices the number of steps dominates the cost.

    Reference: P. Patarasuk and X. Yuan, "Bandwidth optimal all-reduce algorithms for clusters of
        workstations", 2009.
    """
    num_replicas = len(devices)
    chunks = cut_in_parts(per_replica_tensors, devices)
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
    shapes = [tensor.shape for tensor in per_replica_tensors[0]]
    sums = []
    for own_chunks, device in zip(chunks, devices, strict=True):
        with tf.device(device):
            sums.append(join_parts(own_chunks, shapes))
    return sums


def direct(per_replica_tensors: PerReplicaTensors, devices: Sequence[str]) -> PerReplicaTensors:
    """Sums one part of each tensor on each replica, and sends the sums to all others.

    In each of the two steps every replica sends S / R bytes to every other one: 2 · (R − 1) / R · S
    bytes in all, as in a ring, but over R − 1 connections at once. Suits devices with direct
    connections. Adds in the same order as `reduce_to_one`, so that results are bitwise identical.

    Reference: the "direct" reduce-scatter and all-gather of R. Thakur et al., as above.
    """
    shapes = [tensor.shape for tensor in per_replica_tensors[0]]
    return all_gather(reduce_scatter(per_replica_tensors, devices), shapes, devices)


# Algorithms of `manual` other than "reduce_to_one", which is its own `all_reduce`.
ALL_REDUCE_FUNCTIONS: dict[str, Callable[..., PerReplicaTensors]] = {
    "ring": ring,
    "tree": tree,
    "direct": direct,
}
