"""Tests gradient buckets: contents, order, and round trip."""

import numpy as np
import pytest
import tensorflow as tf

from strategies.gradient_buckets import GradientBuckets

TENSORS = [
    tf.reshape(tf.range(6.0), (2, 3)),
    tf.constant([7, 8], tf.int64),
    tf.constant(9.0),
    tf.zeros([0]),
    tf.range(10.0, 14.0),
]


@pytest.mark.parametrize("bucket_bytes", [0, 1, 20, 1000])
def test_everything_comes_out_as_it_went_in(bucket_bytes):
    gradient_buckets = GradientBuckets(TENSORS, bucket_bytes=bucket_bytes)
    unpacked = gradient_buckets.unpack(gradient_buckets.pack(TENSORS))
    for before, after in zip(TENSORS, unpacked, strict=True):
        assert after.dtype == before.dtype
        np.testing.assert_array_equal(after, before, strict=True)


def test_buckets_fill_from_the_last_tensor_on_and_hold_one_dtype():
    assert GradientBuckets(TENSORS, bucket_bytes=20).buckets == [[4, 3, 2], [1], [0]]
    assert GradientBuckets(TENSORS, bucket_bytes=1000).buckets == [[4, 3, 2, 0], [1]]
    assert GradientBuckets(TENSORS).buckets == [[4], [3], [2], [1], [0]]
    assert [b.shape[0] for b in GradientBuckets(TENSORS, bucket_bytes=20).pack(TENSORS)] == [
        5,
        2,
        6,
    ]


def test_reduced_precision_halves_the_bytes_and_the_digits():
    gradient_buckets = GradientBuckets([tf.constant([1.0, 1.001])], dtype="bfloat16")
    (sent,) = gradient_buckets.pack([tf.constant([1.0, 1.001])])
    assert sent.dtype == tf.bfloat16
    (got,) = gradient_buckets.unpack([sent])
    assert got.dtype == tf.float32
    np.testing.assert_array_equal(got, [1.0, 1.0])


def test_whole_numbers_are_never_reduced():
    gradient_buckets = GradientBuckets([tf.constant([257], tf.int64)], dtype="bfloat16")
    assert gradient_buckets.pack([tf.constant([257], tf.int64)])[0].dtype == tf.int64
