"""Collectives are exact: whole numbers, equality, any number of replicas; shards and buckets."""

import numpy as np
import pytest
import tensorflow as tf

from strategies import ALL_REDUCE_ALGORITHMS
from strategies.collectives import (
    ALL_REDUCE_FUNCTIONS,
    all_gather,
    reduce_scatter,
    shard_bounds,
    shard_sizes,
    weighted_bounds,
)
from strategies.gradient_buckets import GradientBuckets, in_buckets
from strategies.manual import all_reduce
from tests.conftest import CPUS

SHAPES = [(), (0,), (1,), (7,), (3, 5), (2, 3, 4)]  # Nothing, one, a prime, more than replicas.
ALGORITHMS = {"reduce_to_one": all_reduce, **ALL_REDUCE_FUNCTIONS}
NAMES = ALL_REDUCE_ALGORITHMS["manual"]
DTYPES = [tf.float32, tf.float64, tf.float16, tf.bfloat16, tf.int64]


def on_devices(per_replica_arrays, devices):
    """Puts item [r][v] on device r."""
    per_replica_tensors = []
    for arrays, device in zip(per_replica_arrays, devices, strict=True):
        with tf.device(device):
            per_replica_tensors.append([tf.constant(array) for array in arrays])
    return per_replica_tensors


def several_devices(num_replicas):
    """As many as asked for: algorithms do not mind that some are one and the same."""
    return [CPUS[r % len(CPUS)] for r in range(num_replicas)]


@pytest.mark.parametrize("num_replicas", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("algorithm", NAMES)
def test_all_reduce_gives_every_replica_the_exact_sum(algorithm, num_replicas):
    devices = several_devices(num_replicas)
    generator = np.random.default_rng(num_replicas)
    for dtype in DTYPES:
        # Sums of eight are exact in bfloat16 too: whole numbers up to 256.
        arrays = [
            [generator.integers(-31, 32, shape).astype(dtype.as_numpy_dtype) for shape in SHAPES]
            for _ in devices
        ]
        results = ALGORITHMS[algorithm](on_devices(arrays, devices), devices)
        assert len(results) == num_replicas
        for replica_id, result in enumerate(results):
            for position, total in enumerate(result):
                expected = sum(replica[position].astype(np.float64) for replica in arrays)
                np.testing.assert_array_equal(total.numpy().astype(np.float64), expected)
                assert total.dtype == dtype and total.shape == expected.shape
                assert total.device.endswith(devices[replica_id].removeprefix("/"))


@pytest.mark.parametrize("algorithm", NAMES)
def test_tensors_that_cannot_be_summed_are_refused(algorithm):
    buckets = GradientBuckets([tf.constant(1.0)])
    for per_replica_tensors, match in [
        ([[tf.constant(1.0)]], "1 lists of tensors for 2 devices"),
        ([[tf.constant(1.0)], []], "shorter"),
        ([[tf.constant(1.0)], [tf.constant([1.0, 2.0])]], "shape"),
    ]:
        with pytest.raises(ValueError, match=match):
            in_buckets(ALGORITHMS[algorithm], per_replica_tensors, CPUS[:2], buckets)


@pytest.mark.parametrize("weights", [*([1] * n for n in range(1, 9)), (1, 3), (1, 1, 1, 7)])
def test_shards_are_disjoint_complete_in_order_and_as_large_as_their_weights(weights):
    for num_examples in (0, 1, 7, 256):
        num_shards = len(weights)
        bounds = [weighted_bounds(num_examples, weights, i) for i in range(num_shards)]
        starts, ends = zip(*bounds, strict=True)
        assert starts == (0, *ends[:-1]) and ends[-1] == num_examples
        for (start, end), weight in zip(bounds, weights, strict=True):
            exact = num_examples * weight / sum(weights)
            assert abs(end - start - exact) <= min(weight, sum(weights) - weight, 2) + 1e-9
        number = tf.constant(num_examples)
        in_graph = [weighted_bounds(number, weights, tf.constant(i)) for i in range(num_shards)]
        assert [tuple(map(int, pair)) for pair in in_graph] == bounds
        if len(set(weights)) == 1:  # The first shards have the rest.
            assert bounds == [shard_bounds(num_examples, num_shards, i) for i in range(num_shards)]
            sizes = [end - start for start, end in bounds]
            assert max(sizes) - min(sizes) <= 1 and sizes == sorted(sizes, reverse=True)


# Gather and scatter.


@pytest.mark.parametrize("num_devices", [1, 3, 4])
def test_a_reduce_scatter_is_a_sum_in_parts(num_devices):
    devices, generator = CPUS[:num_devices], np.random.default_rng(1)
    arrays = [  # Whole numbers, whose sums are exact.
        [generator.integers(-99, 99, shape).astype(np.float32) for shape in SHAPES] for _ in devices
    ]
    per_device_parts = reduce_scatter(on_devices(arrays, devices), devices)
    totals = [np.sum(copies, axis=0) for copies in zip(*arrays, strict=True)]
    for position, total in enumerate(totals):
        sizes = shard_sizes(total.size, num_devices)
        pieces = np.split(total.ravel(), np.cumsum(sizes)[:-1])
        for device, parts, expected in zip(devices, per_device_parts, pieces, strict=True):
            np.testing.assert_array_equal(parts[position].numpy(), expected)
            assert parts[position].device.endswith(device)
    for device, wholes in zip(devices, all_gather(per_device_parts, SHAPES, devices), strict=True):
        for whole, total in zip(wholes, totals, strict=True):
            np.testing.assert_array_equal(whole.numpy(), total)
            assert whole.device.endswith(device)


# Buckets of gradients.


TENSORS = [
    tf.reshape(tf.range(6.0), (2, 3)),
    tf.constant([7, 8], tf.int64),
    tf.constant(9.0),
    tf.zeros([0]),
    tf.range(10.0, 14.0),
]


def test_buckets_fill_from_the_last_tensor_on_hold_one_dtype_and_lose_nothing():
    for bucket_bytes, buckets in {
        0: [[4], [3], [2], [1], [0]], 20: [[4, 3, 2], [1], [0]], 1000: [[4, 3, 2, 0], [1]]
    }.items():  # fmt: skip
        found = GradientBuckets(TENSORS, bucket_bytes=bucket_bytes)
        assert found.buckets == buckets
        packed = found.pack(TENSORS)
        sizes = [sum(int(tf.size(TENSORS[i])) for i in bucket) for bucket in buckets]
        assert [int(tf.size(bucket)) for bucket in packed] == sizes
        for before, after in zip(TENSORS, found.unpack(packed), strict=True):
            assert after.dtype == before.dtype
            np.testing.assert_array_equal(after, before, strict=True)
