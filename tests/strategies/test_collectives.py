"""Collectives are exact: whole numbers, equality, any number of replicas; shards of a batch."""

import numpy as np
import pytest
import tensorflow as tf

from strategies.collectives import all_gather, reduce_scatter, shard_bounds
from strategies.manual import ALL_REDUCE_FUNCTIONS
from tests.conftest import CPUS

SHAPES = [(0,), (1,), (7,), (3, 5), (2, 3, 4)]  # Nothing, one, a prime, more than replicas.
DTYPES = [tf.float32, tf.float64, tf.bfloat16, tf.int64]


def on_devices(per_replica_arrays, devices):
    """Puts item [r][v] on device r."""
    per_replica_tensors = []
    for arrays, device in zip(per_replica_arrays, devices, strict=True):
        with tf.device(device):
            per_replica_tensors.append([tf.constant(array) for array in arrays])
    return per_replica_tensors


@pytest.mark.parametrize("num_replicas", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("algorithm", ALL_REDUCE_FUNCTIONS)
def test_all_reduce_gives_every_replica_the_exact_sum(algorithm, num_replicas):
    # As many as asked for: algorithms do not mind that some are one and the same.
    devices = [CPUS[r % len(CPUS)] for r in range(num_replicas)]
    generator = np.random.default_rng(num_replicas)
    for dtype in DTYPES:
        # Sums of eight are exact in bfloat16 too: whole numbers up to 256.
        arrays = [
            [
                generator.integers(-31, 32, shape).astype(dtype.as_numpy_dtype)
                for shape in [(), *SHAPES]
            ]
            for _ in devices
        ]
        results = ALL_REDUCE_FUNCTIONS[algorithm](on_devices(arrays, devices), devices)
        assert len(results) == num_replicas
        for replica_id, result in enumerate(results):
            for position, total in enumerate(result):
                expected = sum(replica[position].astype(np.float64) for replica in arrays)
                np.testing.assert_array_equal(total.numpy().astype(np.float64), expected)
                assert total.dtype == dtype and total.shape == expected.shape
                assert total.device.endswith(devices[replica_id].removeprefix("/"))


@pytest.mark.parametrize("num_shards", range(1, 9))
def test_shards_are_disjoint_complete_in_order_and_the_first_are_larger(num_shards):
    for num_examples in (0, 1, 7, 256):
        bounds = [shard_bounds(num_examples, num_shards, i) for i in range(num_shards)]
        starts, ends = zip(*bounds, strict=True)
        assert starts == (0, *ends[:-1]) and ends[-1] == num_examples
        sizes = [end - start for start, end in bounds]
        assert max(sizes) - min(sizes) <= 1 and sizes == sorted(sizes, reverse=True)
        number = tf.constant(num_examples)
        in_graph = [shard_bounds(number, num_shards, tf.constant(i)) for i in range(num_shards)]
        assert [tuple(map(int, pair)) for pair in in_graph] == bounds


@pytest.mark.parametrize("num_devices", [1, 3, 4])
def test_a_reduce_scatter_is_a_sum_in_parts(num_devices):
    devices, generator = CPUS[:num_devices], np.random.default_rng(1)
    arrays = [  # Whole numbers, whose sums are exact.
        [generator.integers(-99, 99, shape).astype(np.float32) for shape in SHAPES] for _ in devices
    ]
    per_device_parts = reduce_scatter(on_devices(arrays, devices), devices)
    totals = [np.sum(copies, axis=0) for copies in zip(*arrays, strict=True)]
    for position, total in enumerate(totals):
        for r, (device, parts) in enumerate(zip(devices, per_device_parts, strict=True)):
            start, end = shard_bounds(len(total), num_devices, r)
            np.testing.assert_array_equal(parts[position].numpy(), total[start:end])
            assert parts[position].device.endswith(device)
    for device, wholes in zip(devices, all_gather(per_device_parts, devices), strict=True):
        for whole, total in zip(wholes, totals, strict=True):
            np.testing.assert_array_equal(whole.numpy(), total)
            assert whole.device.endswith(device)
