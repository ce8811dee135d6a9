"""Collectives are exact: whole numbers, equality, any number of replicas; shards and buckets."""

import numpy as np
import pytest
import tensorflow as tf

from conftest import CPUS
from small_models import create
from strategies import ALL_REDUCE_ALGORITHMS
from strategies.collectives import (
    ALL_REDUCE_FUNCTIONS,
    in_buckets,
    shard_bounds,
    shard_sizes,
    weighted_bounds,
)
from strategies.gather_scatter import all_gather, reduce_scatter
from strategies.gradient_buckets import GradientBuckets
from strategies.manual import all_reduce, split_batch

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


@pytest.mark.parametrize("num_replicas", [1, 2, 3, 4, 5, 8])
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


@pytest.mark.parametrize("num_replicas", [2, 3])
@pytest.mark.parametrize("algorithm", NAMES)
def test_compiled_in_buckets_it_is_the_same_sum(algorithm, num_replicas):
    devices = CPUS[:num_replicas]
    generator = np.random.default_rng(0)
    arrays = [
        [generator.integers(-31, 32, shape).astype(np.float32) for shape in SHAPES] for _ in devices
    ]
    per_replica_tensors = on_devices(arrays, devices)
    gradient_buckets = GradientBuckets(per_replica_tensors[0], bucket_bytes=64, dtype="bfloat16")

    @tf.function
    def reduce():
        return in_buckets(ALGORITHMS[algorithm], per_replica_tensors, devices, gradient_buckets)

    for result in reduce():
        for position, total in enumerate(result):
            expected = sum(replica[position] for replica in arrays)
            np.testing.assert_array_equal(total.numpy(), expected, strict=True)


@pytest.mark.parametrize("num_replicas", [3, 8])
def test_direct_adds_in_the_order_of_reduce_to_one(num_replicas):
    devices, normal = several_devices(num_replicas), np.random.default_rng(0).normal
    tensors = on_devices([[normal(size=101).astype(np.float32)] for _ in devices], devices)
    first, second = (
        ALGORITHMS[name](tensors, devices)[0][0] for name in ("reduce_to_one", "direct")
    )
    np.testing.assert_array_equal(first, second)


def test_all_reduce_leaves_its_input_alone():
    per_replica_tensors = on_devices([[np.float32(1)], [np.float32(2)]], CPUS[:2])
    all_reduce(per_replica_tensors, CPUS[:2])
    assert [tensors[0].numpy() for tensors in per_replica_tensors] == [1, 2]


@pytest.mark.parametrize(
    ("per_replica_tensors", "match"),
    [
        ([], "0 lists of tensors for 2 devices"),
        ([[tf.constant(1.0)]], "1 lists"),
        ([[tf.constant(1.0)], []], "shorter"),
        ([[tf.constant(1.0)], [tf.constant([1.0, 2.0])]], "shape"),
    ],
)
@pytest.mark.parametrize("algorithm", NAMES)
def test_tensors_that_cannot_be_summed_are_refused(per_replica_tensors, match, algorithm):
    buckets = GradientBuckets([tf.constant(1.0)])
    with pytest.raises(ValueError, match=match):
        in_buckets(ALGORITHMS[algorithm], per_replica_tensors, CPUS[:2], buckets)


@pytest.mark.parametrize("num_replicas", range(1, 9))
@pytest.mark.parametrize("num_examples", [0, 1, 4, 7, 100, 256])
def test_shards_are_disjoint_complete_and_even(num_replicas, num_examples):
    bounds = [shard_bounds(num_examples, num_replicas, r) for r in range(num_replicas)]
    starts, ends = zip(*bounds, strict=True)
    assert starts == (0, *ends[:-1]) and ends[-1] == num_examples
    sizes = [end - start for start, end in bounds]
    assert max(sizes) - min(sizes) <= 1
    assert sizes == sorted(sizes, reverse=True)
    tensor_bounds = [
        shard_bounds(tf.constant(num_examples), num_replicas, r) for r in range(num_replicas)
    ]
    assert [(int(start), int(end)) for start, end in tensor_bounds] == bounds


@pytest.mark.parametrize("num_examples", [1, 4, 17, 100, 256])
@pytest.mark.parametrize("weights", [(1,), (1, 1, 1), (3, 1), (1, 3), (2, 3, 5), (1, 1, 1, 7)])
def test_weighted_shards_are_all_examples_in_order(weights, num_examples):
    bounds = [weighted_bounds(num_examples, weights, i) for i in range(len(weights))]
    assert [start for start, _ in bounds] == [0, *(end for _, end in bounds[:-1])]
    assert bounds[-1][1] == num_examples
    for (start, end), weight in zip(bounds, weights, strict=True):
        exact = num_examples * weight / sum(weights)
        assert abs(end - start - exact) <= min(weight, sum(weights) - weight, 2) + 1e-9
    in_graph = [
        [int(b) for b in weighted_bounds(tf.constant(num_examples), weights, tf.constant(i))]
        for i in range(len(weights))
    ]
    assert in_graph == [list(b) for b in bounds]
    if len(set(weights)) == 1:
        assert bounds == [shard_bounds(num_examples, len(weights), i) for i in range(len(weights))]


@pytest.mark.parametrize("num_replicas", [1, 2, 3, 4])
def test_split_batch_keeps_order_and_places_shards(num_replicas):
    devices = CPUS[:num_replicas]
    batch = (tf.range(10), tf.reshape(tf.range(20), (10, 2)))
    shards = split_batch(batch, devices)
    assert len(shards) == num_replicas
    for position, whole in enumerate(batch):
        joined = np.concatenate([shard[position].numpy() for shard in shards])
        np.testing.assert_array_equal(joined, whole.numpy())
    for (numbers, _), device in zip(shards, devices, strict=True):
        assert numbers.device.endswith(device.removeprefix("/"))


# Gather and scatter.


def whole_numbers(num_devices, shape):
    """A tensor of each device; all sums of them are exact."""
    generator, tensors = np.random.default_rng(1), []
    for device in CPUS[:num_devices]:
        with tf.device(device):
            tensors.append(tf.constant(generator.integers(-99, 99, shape), tf.float32))
    return tensors


@pytest.mark.parametrize(("num_devices", "axis"), [(1, 0), (2, 1), (3, 0), (4, 1)])
def test_a_reduce_scatter_is_a_sum_in_parts(num_devices, axis):
    devices, tensors = CPUS[:num_devices], whole_numbers(num_devices, (7, 6))
    sizes = shard_sizes(tensors[0].shape[axis], num_devices)
    parts = reduce_scatter(tensors, sizes, devices, axis=axis)
    total = np.sum([t.numpy() for t in tensors], axis=0)
    for part, expected, device in zip(
        parts, np.split(total, np.cumsum(sizes)[:-1], axis), devices, strict=True
    ):
        np.testing.assert_array_equal(part.numpy(), expected)
        assert part.device.endswith(device)
    for whole, device in zip(all_gather(parts, devices, axis=axis), devices, strict=True):
        np.testing.assert_array_equal(whole.numpy(), total)
        assert whole.device.endswith(device)


def test_a_reduce_scatter_adds_in_the_order_of_the_devices():
    """(1e8 + −1e8) + 1 is 1, in float32; 1e8 + (−1e8 + 1) is 0."""
    tensors = [tf.constant([value]) for value in (1e8, -1e8, 1.0)]
    parts = reduce_scatter(tensors, [1, 0, 0], CPUS[:3])
    assert [part.numpy().tolist() for part in parts] == [[1.0], [], []]


def test_its_all_reduce_is_a_sum_on_every_device():
    strategy = create("sharded", 3)
    tensors = [[t, t[0]] for t in whole_numbers(3, (4, 5))]
    total = np.sum([t.numpy() for t, _ in tensors], axis=0)
    for r, (matrix, row) in enumerate(strategy.all_reduce(tensors)):
        np.testing.assert_array_equal(matrix.numpy(), total)
        np.testing.assert_array_equal(row.numpy(), total[0])
        assert matrix.device.endswith(CPUS[r])


# Buckets of gradients.


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
