"""Tests the all-reduce self-test, and the divergence check of replicas during training."""

import itertools

import numpy as np
import pytest
import tensorflow as tf

from app.options.table import Distribution
from app.runtime.errors import AllReduceError, ReplicaDivergenceError
from app.training.all_reduce_self_test import explain, run_all_reduce_self_test
from app.training.replica_divergence import check_replica_divergence
from strategies.manual import ManualStrategy
from tests.conftest import CPUS
from tests.small_models import create, deep_norm_network, momentum_sgd, small_network


def test_hierarchical_on_three_replicas_loses_the_last():
    """TensorFlow's own, in this version: wrong for odd counts, and alike on every replica."""
    with pytest.raises(AllReduceError, match="got 3 instead of 7: replica 2 was lost") as caught:
        run_all_reduce_self_test(create("mirrored", 3, all_reduce="hierarchical"))
    assert caught.value.exit_code == 6
    run_all_reduce_self_test(create("mirrored", 4, all_reduce="hierarchical"))


class FaultyStrategy(ManualStrategy):
    """Adds each replica as often as `counts` says, on the replica `where`."""

    counts, where = (), 0

    def all_reduce(self, per_replica_tensors):
        totals = [
            sum(count * tensor for count, tensor in zip(self.counts, copies, strict=True))
            for copies in zip(*per_replica_tensors, strict=True)
        ]
        right = super().all_reduce(per_replica_tensors)
        return [totals if r == self.where else right[r] for r in range(self.num_shards)]


def test_the_self_test_distinguishes_every_case():
    strategy = FaultyStrategy(CPUS[:3], Distribution())
    strategy.build(small_network, momentum_sgd)
    strategy.where = 1
    for strategy.counts in itertools.product((0, 1, 2), repeat=3):
        counts = strategy.counts
        if counts == (1, 1, 1):
            run_all_reduce_self_test(strategy)
            continue
        with pytest.raises(AllReduceError, match="replica 1 got") as caught:
            run_all_reduce_self_test(strategy)
        text = str(caught.value)
        assert ("each replica counts 2 times" in text) == (counts == (2, 2, 2))
        for what, number in (("lost", 0), ("counted more than once", 2)):
            replicas = ", ".join(str(r) for r, count in enumerate(counts) if count == number)
            is_named = bool(replicas) and counts != (2, 2, 2)
            assert (f"replica {replicas} was {what}" in text) == is_named


def test_a_mean_is_distinguished_from_a_sum():
    partly = "replica i sent 1 in element i, and replica 0 got 1 0 there: replica 1 was lost"
    assert explain(np.array([1.0, 0.0, 3.0]), 0, 2) == partly
    for got in ([0.5, 0.5, 1.5], np.float32([1, 1, 1, 7]) / np.float32(3)):  # 1/3 is rounded.
        assert "a mean in place of the sum" in explain(np.array(got, float), 0, len(got) - 1)


def test_moved_elements_are_not_repeated_ones():
    assert explain(np.array([3.0, 1.0, 1.0]), 0, 2).endswith(": the elements are in another order")


def test_many_replicas_are_counted_in_groups_of_eight():
    """Beyond 2⁸ a sum would not be exact in bfloat16."""
    got = np.concatenate([np.ones(10), [255, 1]])
    got[9] = 0
    text = explain(got, 0, 10)
    assert "got 255 1 instead of 255 3" in text
    assert "replica 9 was lost" in text


def change(strategy, replica_id, name, amount=0.5):
    (name,) = (n for n in strategy.states.variable_names if n.endswith(name))
    variable = strategy.copies()[replica_id][name]
    variable.assign(variable + tf.cast(amount, variable.dtype))


@pytest.mark.parametrize("name", ["manual", "mirrored"])
def test_only_statistics_may_differ_between_replicas(name):
    strategy = create(name, 3, deep_norm_network)
    assert check_replica_divergence(strategy).tensor == ""
    change(strategy, 1, "norm/moving_mean")
    divergence = check_replica_divergence(strategy)
    assert (divergence.tensor, divergence.absolute) == ("deep_norm/norm/moving_mean", 0.5)
    change(strategy, 2, "logits/kernel", 0.25)
    with pytest.raises(ReplicaDivergenceError) as caught:
        check_replica_divergence(strategy)
    text = str(caught.value)
    assert "logits/kernel on replica 2 differs from replica 0, 1 by 0.25" in text
    assert caught.value.exit_code == 9


def test_what_the_optimizer_keeps_counts_too():
    strategy = create("manual", 2)
    change(strategy, 1, "optimizer/iteration", 1)
    with pytest.raises(ReplicaDivergenceError, match="iteration on replica 1"):
        check_replica_divergence(strategy)
