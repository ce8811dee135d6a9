"""The check of the all-reduce before training, and of the copies of the weights during it."""

import itertools

import numpy as np
import pytest
import tensorflow as tf

from app.errors import AllReduceError, ReplicaDivergenceError
from app.training.checks import check_all_reduce, check_copies
from strategies.manual import ManualStrategy
from tests.conftest import CPUS
from tests.small_models import create, deep_norm_network, momentum_sgd, small_network


def test_hierarchical_on_three_replicas_loses_the_last():
    """TensorFlow's own, in this version: wrong for odd counts, and alike on every replica."""
    with pytest.raises(
        AllReduceError,
        match="got 1 2 0 instead of 1 2 3; replica 2 was lost; use --all_reduce=auto",
    ) as caught:
        check_all_reduce(create("mirrored", 3, all_reduce="hierarchical"))
    assert caught.value.exit_code == 6
    check_all_reduce(create("mirrored", 4, all_reduce="hierarchical"))


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


def test_the_check_distinguishes_every_case():
    strategy = FaultyStrategy(CPUS[:3])
    strategy.build(small_network, momentum_sgd)
    strategy.where = 1
    for strategy.counts in itertools.product((0, 1, 2, 1 / 3), repeat=3):
        if strategy.counts == (1, 1, 1):
            check_all_reduce(strategy)
            continue
        with pytest.raises(AllReduceError, match="replica 1 got") as caught:
            check_all_reduce(strategy)
        lost = ", ".join(str(r) for r, count in enumerate(strategy.counts) if count == 0)
        assert (f"replica {lost} was lost" in str(caught.value)) == bool(lost)
        for count in (2, 1 / 3):
            times = f"each replica counts {count:.3g} times"
            assert (times in str(caught.value)) == (strategy.counts == (count,) * 3)


def change(strategy, replica_id, name, amount=0.5):
    (name,) = (n for n in strategy.states.variable_names if n.endswith(name))
    variable = strategy.copies()[replica_id][name]
    variable.assign(variable + tf.cast(amount, variable.dtype))


@pytest.mark.parametrize("name", ["manual", "mirrored"])
def test_only_statistics_may_differ_between_replicas(name):
    strategy = create(name, 3, deep_norm_network)
    check_copies(strategy)
    change(strategy, 1, "norm/moving_mean")
    check_copies(strategy)
    change(strategy, 2, "logits/kernel", 0.25)
    with pytest.raises(ReplicaDivergenceError) as caught:
        check_copies(strategy)
    text = str(caught.value)
    assert "logits/kernel on replica 2 differs from replica 0, 1 by 0.25" in text
    assert caught.value.exit_code == 9


def test_what_the_optimizer_keeps_and_a_value_that_is_not_finite_count_too():
    strategy = create("manual", 2)
    change(strategy, 1, "optimizer/iteration", 1)
    with pytest.raises(ReplicaDivergenceError, match="iteration on replica 1"):
        check_copies(strategy)
    strategy = create("manual", 2)
    change(strategy, 1, "logits/bias", np.nan)
    with pytest.raises(ReplicaDivergenceError, match="logits/bias on replica 1"):
        check_copies(strategy)
