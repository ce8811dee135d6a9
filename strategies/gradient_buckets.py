"""Packs many small gradients into a few large buckets for the all-reduce."""

from collections.abc import Sequence

import tensorflow as tf


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
