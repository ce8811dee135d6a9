"""Implements all-reduce algorithms on per-replica lists, for study, and gradient buckets.

Each function takes lists with one entry per replica, works in a graph and eagerly, and places each
result on the device of its replica. `strategies/manual.py` has the simplest all-reduce.
"""

import functools
import itertools
from collections.abc import Callable, Sequence

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
    chunks = _cut(per_replica_tensors, devices)
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
    return _join(chunks, per_replica_tensors, devices)


def direct(per_replica_tensors: PerReplicaTensors, devices: Sequence[str]) -> PerReplicaTensors:
    """Sums one chunk on each replica, in replica order, and sends the total to all others.

    In each of the two steps every replica sends S / R bytes to every other one: 2 · (R − 1) / R · S
    bytes in all, as in a ring, but over R − 1 connections at once. Suits devices with direct
    connections. Adds in the same order as `reduce_to_one`, so that results are bitwise identical.

    Reference: the "direct" reduce-scatter and all-gather of R. Thakur et al., as above.
    """
    chunks = _cut(per_replica_tensors, devices)
    totals = []
    for c, device in enumerate(devices):
        with tf.device(device):
            copies = [replica_chunks[c] for replica_chunks in chunks]
            totals.append([add_in_order(parts) for parts in zip(*copies, strict=True)])
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
        own_chunks: list[list[tf.Tensor]] = [[] for _ in devices]
        with tf.device(device):
            for tensor in tensors:
                flat = tf.reshape(tensor, [-1])
                for c, own in enumerate(own_chunks):
                    start, end = shard_bounds(flat.shape[0], num_replicas, c)
                    own.append(flat[start:end])
        chunks.append(own_chunks)
    return chunks


def _join(
    chunks: list[list[list[tf.Tensor]]],
    per_replica_tensors: PerReplicaTensors,
    devices: Sequence[str],
) -> PerReplicaTensors:
    """Joins tensors from their chunks; the inverse of `_cut`."""
    joined = []
    for own_chunks, tensors, device in zip(chunks, per_replica_tensors, devices, strict=True):
        with tf.device(device):
            vectors = [tf.concat(parts, axis=0) for parts in zip(*own_chunks, strict=True)]
            joined.append([tf.reshape(v, t.shape) for v, t in zip(vectors, tensors, strict=True)])
    return joined


# Algorithms of `manual` other than "reduce_to_one", which is its own `all_reduce`.
ALL_REDUCE_FUNCTIONS: dict[str, Callable[..., PerReplicaTensors]] = {
    "ring": ring,
    "tree": tree,
    "direct": direct,
}


class GradientBuckets:
    """Packs the tensors of one replica into flat buckets, and unpacks them.

    Each collective has a fixed latency, so that many small tensors are faster in one. Buckets are
    filled from the last tensor to the first, the order in which a backward pass produces gradients;
    each holds tensors of one dtype. In a compiled step, a bucket is sent as soon as its gradients
    are ready, while the backward pass continues with earlier layers. (XLA returns all gradients at
    once.)

    Args:
        tensors: tensors of one replica, or variables of the same shapes.
        bucket_bytes: a bucket is closed once it holds this many bytes; 0 for one bucket per tensor.
        dtype: dtype of floating-point tensors in the all-reduce; None for their own. A 16-bit dtype
            halves the bytes and reduces the precision of the sum.

    Reference: S. Li et al., "PyTorch Distributed", 2020, section 3.2: gradient bucketing.
    """

    def __init__(
        self, tensors: Sequence[tf.Tensor], *, bucket_bytes: int = 0, dtype: str | None = None
    ):
        self._likes = [(tensor.shape, tf.as_dtype(tensor.dtype)) for tensor in tensors]
        self._dtypes = [
            tf.as_dtype(dtype) if dtype and own.is_floating else own for _, own in self._likes
        ]
        self._is_bucketed = bucket_bytes > 0
        self.buckets = self._fill(bucket_bytes)

    @property
    def size_bytes(self) -> int:
        """Bytes that a replica sends, in the dtypes of the all-reduce."""
        return sum(
            shape.num_elements() * dtype.size
            for (shape, _), dtype in zip(self._likes, self._dtypes, strict=True)
        )

    def _fill(self, bucket_bytes: int) -> list[list[int]]:
        """Returns the positions of the tensors in each bucket."""
        buckets: list[list[int]] = []
        open_buckets: dict[tf.DType, tuple[list[int], int]] = {}
        for position in reversed(range(len(self._likes))):
            shape, dtype = self._likes[position][0], self._dtypes[position]
            bucket, size = open_buckets.pop(dtype, ([], 0))
            if not bucket:
                buckets.append(bucket)
            bucket.append(position)
            size += shape.num_elements() * dtype.size
            if size < bucket_bytes:
                open_buckets[dtype] = bucket, size
        return buckets

    def pack(self, tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Returns one tensor per bucket."""
        cast = [tf.cast(t, dtype) for t, dtype in zip(tensors, self._dtypes, strict=True)]
        if not self._is_bucketed:
            return [cast[position] for (position,) in self.buckets]
        return [
            tf.concat([tf.reshape(cast[position], [-1]) for position in bucket], axis=0)
            for bucket in self.buckets
        ]

    def unpack(self, buckets: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Returns the tensors of the buckets, in their original order, shape and dtype."""
        tensors = [None] * len(self._likes)
        for bucket, positions in zip(buckets, self.buckets, strict=True):
            sizes = [self._likes[position][0].num_elements() for position in positions]
            parts = tf.split(bucket, sizes) if self._is_bucketed else [bucket]
            for part, position in zip(parts, positions, strict=True):
                shape, dtype = self._likes[position]
                tensors[position] = tf.cast(tf.reshape(part, shape), dtype)
        return tensors


def in_buckets(
    algorithm: Callable[..., PerReplicaTensors],
    per_replica_tensors: PerReplicaTensors,
    devices: Sequence[str],
    gradient_buckets: GradientBuckets,
) -> PerReplicaTensors:
    """Sums tensors over the replicas with an all-reduce such as `ring`, in buckets.

    Shapes are fully known, and the same for all replicas.

    Raises:
        ValueError: there are not as many lists as devices, or lists differ in V or in a shape.
    """
    if len(per_replica_tensors) != len(devices):
        raise ValueError(f"{len(per_replica_tensors)} lists of tensors for {len(devices)} devices")
    for copies in zip(*per_replica_tensors, strict=True):
        shapes = {str(copy.shape) for copy in copies}
        if len(shapes) > 1:
            raise ValueError(f"replicas disagree on a shape: {' and '.join(sorted(shapes))}")
    if len(devices) == 1:
        return [list(per_replica_tensors[0])]
    packed, unpacked = [], []
    for device, tensors in zip(devices, per_replica_tensors, strict=True):
        with tf.device(device):
            packed.append(gradient_buckets.pack(tensors))
    for device, sums in zip(devices, algorithm(packed, devices), strict=True):
        with tf.device(device):
            unpacked.append(gradient_buckets.unpack(sums))
    return unpacked
