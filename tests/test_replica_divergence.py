"""Tests the all-reduce self-test, and the divergence check of replicas during training."""

import itertools

import keras
import numpy as np
import pytest
import tensorflow as tf

from app.runtime.errors import AllReduceError, ReplicaDivergenceError
from app.training.all_reduce_self_test import explain, run_all_reduce_self_test
from app.training.replica_divergence import check_replica_divergence
from conftest import CPUS
from small_models import create, seeded, small_network, small_resnet
from strategies import STRATEGIES
from strategies.manual import ManualStrategy
from strategies.mirrored import MirroredStrategy


@pytest.mark.parametrize("num_replicas", [1, 2, 3, 4])
@pytest.mark.parametrize("name", STRATEGIES)
def test_a_right_all_reduce_passes(name, num_replicas):
    if name == "single" and num_replicas > 1:
        pytest.skip("single has one replica")
    options = {"model_parallel": 1} if name in ("pipeline", "tensor") else {}
    strategy = create(name, num_replicas, **options)
    assert strategy.num_replicas == num_replicas
    assert run_all_reduce_self_test(strategy) is None  # It raises what it finds.


def test_hierarchical_on_three_replicas_loses_the_last():
    """TensorFlow's own, in this version: wrong for odd counts, and alike on every replica."""
    strategy = MirroredStrategy(CPUS[:3], all_reduce="hierarchical")
    strategy.build(seeded(small_network), sgd)
    with pytest.raises(AllReduceError, match="got 3 instead of 7: replica 2 was lost") as caught:
        run_all_reduce_self_test(strategy)
    assert caught.value.exit_code == 6
    even = MirroredStrategy(CPUS[:4], all_reduce="hierarchical")
    even.build(seeded(small_network), sgd)
    run_all_reduce_self_test(even)


def sgd():
    return keras.optimizers.SGD(0.1)


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


@pytest.mark.parametrize("counts", itertools.product((0, 1, 2), repeat=3))
def test_the_self_test_distinguishes_every_case(counts):
    strategy = FaultyStrategy(CPUS[:3])
    strategy.counts, strategy.where = counts, 1
    strategy.build(seeded(small_network), sgd)
    if counts == (1, 1, 1):
        run_all_reduce_self_test(strategy)
        return
    with pytest.raises(AllReduceError) as caught:
        run_all_reduce_self_test(strategy)
    text = str(caught.value)
    assert "replica 1 got" in text
    if counts == (2, 2, 2):
        assert "each replica counts 2 times" in text
        return
    for what, number in (("lost", 0), ("counted more than once", 2)):
        replicas = ", ".join(str(r) for r, count in enumerate(counts) if count == number)
        assert (f"replica {replicas} was {what}" in text) == bool(replicas)


def test_a_mean_is_distinguished_from_a_sum():
    assert "a mean in place of the sum" in explain(np.array([0.5, 0.5, 1.5]), 0, 2)


def test_many_replicas_are_counted_in_groups_of_eight():
    """Beyond 2⁸ a sum would not be exact in bfloat16."""
    got = np.concatenate([np.ones(10), [255, 1]])
    got[9] = 0
    text = explain(got, 0, 10)
    assert "got 255 1 instead of 255 3" in text
    assert "replica 9 was lost" in text


def change(strategy, replica_id, name, amount=0.5):
    (name,) = (n for n in strategy.variable_names if n.endswith(name))
    variable = strategy.copies()[replica_id][name]
    variable.assign(variable + tf.cast(amount, variable.dtype))


@pytest.mark.parametrize("name", ["manual", "mirrored"])
def test_replicas_in_step_pass(name):
    strategy = create(name, 3, small_resnet)
    assert check_replica_divergence(strategy).tensor == ""
    change(strategy, 1, "stem_norm/moving_mean")
    divergence = check_replica_divergence(strategy)
    assert (divergence.tensor, divergence.absolute) == ("stem_norm/moving_mean", 0.5)


@pytest.mark.parametrize("name", ["manual", "mirrored"])
def test_a_weight_that_differs_is_named_with_its_replicas(name):
    strategy = create(name, 3)
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
