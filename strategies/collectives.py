"""Collectives on per-replica lists, written to be read.

Each function takes lists with one entry for each replica, works in a graph and eagerly, and places
each result on the device of its replica. `strategies/manual.py` has the simplest all-reduce.
"""

import functools
import itertools
from collections.abc import Callable, Sequence

import tensorflow as tf

from strategies.gradient_buckets import GradientBuckets

PerReplicaTensors = list[list[tf.Tensor]]


def shard_bounds(
    num_examples: int | tf.Tensor, num_replicas: int, replica_id: int | tf.Tensor
) -> tuple[int | tf.Tensor, int | tf.Tensor]:
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


def shard_sizes(num_examples: int, num_replicas: int) -> list[int]:
    """Returns how many examples of a batch each replica gets."""
    bounds = [shard_bounds(num_examples, num_replicas, r) for r in range(num_replicas)]
    return [end - start for start, end in bounds]


def weighted_bounds(
    num_examples: int | tf.Tensor, weights: Sequence[int], shard_id: int | tf.Tensor
) -> tuple[int | tf.Tensor, int | tf.Tensor]:
    """Returns where a shard starts and ends in a batch that is split in proportion to weights.

    The batch is split into as many equal units as the weights add up to, and a shard of weight w
    is w units in a row: 100 by 3 and 1 is 75 and 25, by 1, 1 and 1 as in `shard_bounds`.

    Args:
        num_examples: int or int scalar tensor.
        weights: of the shards, whole numbers of at least 1.
        shard_id: int or int scalar tensor.
    """
    ends = list(itertools.accumulate(weights))
    if tf.is_tensor(shard_id):
        end = tf.gather(tf.constant(ends), shard_id)
        first = end - tf.gather(tf.constant(list(weights)), shard_id)
    else:
        end, first = ends[shard_id], ends[shard_id] - weights[shard_id]
    return tuple(shard_bounds(num_examples, ends[-1], unit)[0] for unit in (first, end))


def all_gather(
    parts: Sequence[tf.Tensor], devices: Sequence[str], *, axis: int = 0
) -> list[tf.Tensor]:
    """Copies the parts of a tensor, one of each device, to every device, and joins them there.

    Of S bytes each device receives what the others have of them: (R - 1) * S bytes in all.

    Args:
        parts: R tensors; item [r] is on device r.
        devices: R device names.
        axis: along which the tensor is in parts.

    Returns:
        R tensors with the same bits; item [r] is on device r.
    """
    wholes = []
    for device in devices:
        with tf.device(device):
            wholes.append(tf.concat(parts, axis=axis))
    return wholes


def reduce_scatter(
    wholes: Sequence[tf.Tensor],
    sizes: Sequence[int],
    devices: Sequence[str],
    *,
    axis: int = 0,
    receivers: Sequence[str] = (),
    on_pieces: Callable[[int, list[tf.Tensor]], list[tf.Tensor]] = lambda index, pieces: pieces,
) -> list[tf.Tensor]:
    """Adds tensors of all devices, in order; each device gets its part of the sum.

    An all-reduce is this and an `all_gather`. Of S bytes each device sends the others their parts:
    (R - 1) * S bytes in all.

    Args:
        wholes: R tensors of one shape; item [r] is on device r.
        sizes: of the parts, along the axis.
        devices: R device names.
        axis: along which the sum is split.
        receivers: the devices of the parts; empty where they are those of `wholes`.
        on_pieces: is given the number of a part and the pieces that make it up, one of each
            device, and returns what is added.

    Returns:
        The parts of the sum; item [r] is on receiver r.
    """
    pieces = []
    for whole, device in zip(wholes, devices, strict=True):
        with tf.device(device):  # Split where it is: of each tensor only the part travels.
            pieces.append(tf.split(whole, sizes, axis=axis))
    parts = []
    for index, device in enumerate(receivers or devices):
        with tf.device(device):
            parts.append(add_in_order(on_pieces(index, [piece[index] for piece in pieces])))
    return parts


def add_in_order(copies: Sequence[tf.Tensor]) -> tf.Tensor:
    """Adds tensors of one shape from the first to the last: ((a + b) + c) + d.

    Not `tf.add_n`, whose order depends on which of its inputs it may overwrite.
    """
    return functools.reduce(tf.add, copies)


def tree(per_replica_tensors: PerReplicaTensors, devices: Sequence[str]) -> PerReplicaTensors:
    """Adds in pairs, then pairs of pairs, and copies the totals back down the same tree.

    2 · ⌈log₂ R⌉ steps of whole tensors: the first device receives ⌈log₂ R⌉ · S bytes and sends as
    many. For small tensors on many devices, where steps cost more than bytes.

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
    """Lets chunks travel round a ring: R − 1 steps add them up, R − 1 hand the totals on.

    2 · (R − 1) steps, in each of which every replica sends S / R bytes to the next one. So each
    connection carries 2 · (R − 1) / R · S bytes, the least possible, however many replicas there
    are. For large tensors: on many devices the steps add up.

    Reference: P. Patarasuk and X. Yuan, "Bandwidth optimal all-reduce algorithms for clusters of
        workstations", 2009.
    """
    num_replicas = len(devices)
    chunks = _cut(per_replica_tensors, devices)
    # Reduce-scatter: what replica r − 1 has added up of a chunk so far, r adds its own part to.
    for step in range(1, num_replicas):
        for r, device in enumerate(devices):
            c = (r - step) % num_replicas
            with tf.device(device):
                chunks[r][c] = [
                    so_far + own for so_far, own in zip(chunks[r - 1][c], chunks[r][c], strict=True)
                ]
    # All-gather: now r has all of chunk r + 1, and each total goes round once.
    for step in range(1, num_replicas):
        for r, device in enumerate(devices):
            c = (r + 1 - step) % num_replicas
            with tf.device(device):
                chunks[r][c] = [tf.identity(total) for total in chunks[r - 1][c]]
    return _join(chunks, per_replica_tensors, devices)


def direct(per_replica_tensors: PerReplicaTensors, devices: Sequence[str]) -> PerReplicaTensors:
    """Makes each replica add up one chunk for all of them, in replica order, and hand it round.

    Two steps; in each of them every replica sends S / R bytes to every other one: 2 · (R − 1) / R ·
    S bytes in all, as in a ring, but over R − 1 connections at once. For devices that are all
    connected directly. It adds in the same order as `reduce_to_one`: the same bits.

    Reference: the "direct" reduce-scatter and all-gather of R. Thakur et al., as above.
    """
    chunks = _cut(per_replica_tensors, devices)
    totals = []
    for c, device in enumerate(devices):
        with tf.device(device):
            everyones = [replica_chunks[c] for replica_chunks in chunks]
            totals.append([add_in_order(parts) for parts in zip(*everyones, strict=True)])
    gathered = []
    for device in devices:
        with tf.device(device):
            gathered.append([[tf.identity(total) for total in chunk] for chunk in totals])
    return _join(gathered, per_replica_tensors, devices)


def _cut(
    per_replica_tensors: PerReplicaTensors, devices: Sequence[str]
) -> list[list[list[tf.Tensor]]]:
    """Cuts each tensor into R flat chunks, some of which may be empty.

    Returns:
        Item [r][c][v] is chunk c of tensor v of replica r, on device r.
    """
    num_replicas, chunks = len(devices), []
    for tensors, device in zip(per_replica_tensors, devices, strict=True):
        with tf.device(device):
            flat = [tf.reshape(tensor, [-1]) for tensor in tensors]
            bounds = [
                [shard_bounds(vector.shape[0], num_replicas, c) for vector in flat]
                for c in range(num_replicas)
            ]
            chunks.append(
                [
                    [vector[start:end] for vector, (start, end) in zip(flat, b, strict=True)]
                    for b in bounds
                ]
            )
    return chunks


def _join(
    chunks: list[list[list[tf.Tensor]]],
    per_replica_tensors: PerReplicaTensors,
    devices: Sequence[str],
) -> PerReplicaTensors:
    """Puts tensors back together from their chunks; the opposite of `_cut`."""
    joined = []
    for own_chunks, tensors, device in zip(chunks, per_replica_tensors, devices, strict=True):
        with tf.device(device):
            vectors = [tf.concat(parts, axis=0) for parts in zip(*own_chunks, strict=True)]
            joined.append([tf.reshape(v, t.shape) for v, t in zip(vectors, tensors, strict=True)])
    return joined


# Algorithms of `manual` in place of its own `all_reduce`, which is "reduce_to_one".
ALL_REDUCE_FUNCTIONS: dict[str, Callable[..., PerReplicaTensors]] = {
    "ring": ring,
    "tree": tree,
    "direct": direct,
}


def in_buckets(
    algorithm: Callable[..., PerReplicaTensors],
    per_replica_tensors: PerReplicaTensors,
    devices: Sequence[str],
    gradient_buckets: GradientBuckets,
) -> PerReplicaTensors:
    """Sums tensors over the replicas, in buckets.

    Args:
        algorithm: an all-reduce, for example `ring`.
        per_replica_tensors: R lists of V tensors; item [r][v] is on device r and has the same,
            fully known shape for every r. Left unchanged.
        devices: R device names.
        gradient_buckets: of the tensors of one replica.

    Returns:
        R lists of V tensors, placed like the input; item [r][v] is bitwise identical for every r.

    Raises:
        ValueError: replicas and devices differ in number, or replicas disagree on V or on a shape.
    """
    if len(per_replica_tensors) != len(devices):
        raise ValueError(f"{len(per_replica_tensors)} lists of tensors for {len(devices)} devices")
    for copies in zip(*per_replica_tensors, strict=True):
        shapes = {str(copy.shape) for copy in copies}
        if len(shapes) > 1:
            raise ValueError(f"replicas disagree on a shape: {' and '.join(sorted(shapes))}")
    if len(devices) == 1:
        return [list(per_replica_tensors[0])]
    buckets = _on_each(devices, gradient_buckets.pack, per_replica_tensors)
    return _on_each(devices, gradient_buckets.unpack, algorithm(buckets, devices))


def _on_each(
    devices: Sequence[str],
    function: Callable[[list[tf.Tensor]], list[tf.Tensor]],
    per_replica_tensors: PerReplicaTensors,
) -> PerReplicaTensors:
    """Returns what `function` makes of each replica's tensors, on its own device."""
    results = []
    for device, tensors in zip(devices, per_replica_tensors, strict=True):
        with tf.device(device):
            results.append(function(tensors))
    return results
