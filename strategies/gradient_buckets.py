"""Packs gradients into flat buckets, so that one collective sums many of them."""

from collections.abc import Callable, Sequence

import tensorflow as tf

from strategies.collectives import PerReplicaTensors


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
        self.buckets = self._fill(bucket_bytes)
        # Whether a bucket is more than a tensor.
        self.changes = any(d != own for d, (_, own) in zip(self._dtypes, self._likes, strict=True))
        self.changes |= len(self.buckets) < len(self._likes)

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
        return [
            tf.concat([tf.reshape(cast[position], [-1]) for position in bucket], axis=0)
            for bucket in self.buckets
        ]

    def unpack(self, buckets: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Returns the tensors of the buckets, in their original order, shape and dtype."""
        tensors = [None] * len(self._likes)
        for bucket, positions in zip(buckets, self.buckets, strict=True):
            sizes = [self._likes[position][0].num_elements() for position in positions]
            parts = tf.split(bucket, sizes)
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
    if not gradient_buckets.changes:
        return algorithm(per_replica_tensors, devices)
    packed, unpacked = [], []
    for device, tensors in zip(devices, per_replica_tensors, strict=True):
        with tf.device(device):
            packed.append(gradient_buckets.pack(tensors))
    for device, sums in zip(devices, algorithm(packed, devices), strict=True):
        with tf.device(device):
            unpacked.append(gradient_buckets.unpack(sums))
    return unpacked
