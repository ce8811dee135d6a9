"""Exact collectives, the loss, and the checks of sums and copies."""

import itertools
import math

import numpy as np
import pytest
import tensorflow as tf

from app.errors import AllReduceError, ReplicaDivergenceError
from app.training.checks import check_all_reduce, check_copies
from strategies.base import sum_of_losses
from strategies.manual import ALL_REDUCE_FUNCTIONS
from tests.conftest import CPUS
from tests.small_models import create, deep_norm_network

SHAPES = [(), (0,), (1,), (7,), (3, 5), (2, 3, 4)]  # Nothing, one, a prime, many.
DTYPES = [tf.float32, tf.float64, tf.bfloat16, tf.int64]


def shaped(numbers):
    return [numbers[: math.prod(shape)].reshape(shape) for shape in SHAPES]


@pytest.mark.parametrize("num_replicas", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("algorithm", ALL_REDUCE_FUNCTIONS)
def test_all_reduce_gives_every_replica_the_exact_sum(algorithm, num_replicas):
    devices = [CPUS[r % len(CPUS)] for r in range(num_replicas)]  # Some may be the same one.
    # Sums of eight are exact in bfloat16, too.
    numbers = np.random.default_rng(num_replicas).integers(-31, 32, (num_replicas, 24))
    for dtype in DTYPES:
        per_replica_tensors = []
        for device, own in zip(devices, numbers, strict=True):
            with tf.device(device):
                per_replica_tensors.append([tf.cast(array, dtype) for array in shaped(own)])
        results = ALL_REDUCE_FUNCTIONS[algorithm](per_replica_tensors, devices)
        for device, result in zip(devices, results, strict=True):
            for total, expected in zip(result, shaped(numbers.sum(axis=0)), strict=True):
                np.testing.assert_array_equal(total.numpy().astype(np.float64), expected)
                assert total.dtype == dtype and total.shape == expected.shape
                assert total.device.endswith(device)


def test_label_smoothing_against_the_definition():
    generator = np.random.default_rng(0)
    logits = generator.normal(size=(5, 10)).astype(np.float32)
    labels = generator.integers(0, 10, 5)
    target = 0.9 * np.eye(10)[labels] + 0.1 / 10
    log_probabilities = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    loss = sum_of_losses(tf.constant(logits), tf.constant(labels, tf.int32), 0.1)
    np.testing.assert_allclose(loss, -(target * log_probabilities).sum(), rtol=1e-6)


def test_the_check_of_the_all_reduce_distinguishes_every_case(monkeypatch):
    strategy = create("manual", 3)
    right = strategy.all_reduce
    for counts in itertools.product((0, 1, 2, 1 / 3), repeat=3):

        def all_reduce(per_replica_tensors, counts=counts):
            """Adds each replica as often as `counts` says, on replica 1."""
            results = right(per_replica_tensors)
            results[1] = [
                sum(count * tensor for count, tensor in zip(counts, copies, strict=True))
                for copies in zip(*per_replica_tensors, strict=True)
            ]
            return results

        monkeypatch.setattr(strategy, "all_reduce", all_reduce)
        if counts == (1, 1, 1):
            check_all_reduce(strategy)
            continue
        with pytest.raises(AllReduceError, match="replica 1 got") as caught:
            check_all_reduce(strategy)
        lost = ", ".join(str(r) for r, count in enumerate(counts) if count == 0)
        assert (f"replica {lost} was lost" in str(caught.value)) == bool(lost)
        for count in (2, 1 / 3):
            times = f"each replica counts {count:.3g} times"
            assert (times in str(caught.value)) == (counts == (count,) * 3)


def test_only_statistics_may_differ_between_replicas():
    strategy = create("manual", 3, deep_norm_network)

    def add(replica_id, name, amount):
        copy = strategy.copies()[replica_id]
        (variable,) = (variable for path, variable in copy.items() if path.endswith(name))
        variable.assign(variable + amount)

    add(1, "norm/moving_mean", 0.5)
    check_copies(strategy)
    add(2, "optimizer/iteration", 1)
    with pytest.raises(ReplicaDivergenceError, match="iteration on replica 2 differs"):
        check_copies(strategy)
    add(2, "logits/kernel", 0.25)
    told = "logits/kernel on replica 2 differs from replica 0, 1 by 0.25"
    with pytest.raises(ReplicaDivergenceError, match=told) as caught:
        check_copies(strategy)
    assert caught.value.exit_code == 9
