"""Sharded state: one part on each device; its parity is in `test_strategies.py`."""

import numpy as np
import pytest
import tensorflow as tf

from conftest import CPUS
from placement import devices_of_products, devices_of_variables, step_graph
from small_models import create, deep_network, deep_norm_network, momentum_sgd
from strategies.collectives import shard_bounds, shard_sizes, weighted_bounds
from strategies.sharded import SHARD_CHOICES
from strategies.split_variable import RepeatedVariable, SplitVariable
from walks import batches


@pytest.mark.parametrize("num_devices", [1, 3, 4])
def test_a_device_holds_one_part_in_r(num_devices):
    strategy = create("sharded", num_devices, deep_network, momentum_sgd)
    whole = create("single", 1, deep_network, momentum_sgd)
    per_device = np.zeros(num_devices, int)
    for name, variable in strategy.copies()[0].items():
        size = whole.state()[name].size
        if isinstance(variable, RepeatedVariable):  # The step and the learning rate.
            assert size == 1
            continue
        assert isinstance(variable, SplitVariable)
        sizes = [int(tf.size(part)) for part in variable.parts]
        assert sizes == shard_sizes(size, num_devices)  # 1/R, but for a rest of one element.
        per_device += sizes
    total = sum(a.size for a in whole.state().values() if a.size > 1)
    assert per_device.sum() == total
    num_variables = len(strategy.variable_names)
    assert np.all(np.abs(per_device - total / num_devices) < num_variables)


@pytest.mark.parametrize("shard", SHARD_CHOICES)
def test_only_what_is_sharded_is_in_parts(shard):
    strategy = create("sharded", 2, deep_network, momentum_sgd, shard=shard)
    assert strategy.num_copies == len(strategy.copies()) == (1 if shard == "weights" else 2)
    for copy in strategy.copies():
        for name, variable in copy.items():
            in_parts = isinstance(variable, SplitVariable | RepeatedVariable)
            assert in_parts == (shard == "weights" or name.startswith("optimizer/")), name


@pytest.mark.parametrize("shard", SHARD_CHOICES)
def test_every_variable_is_on_its_device(shard):
    strategy = create("sharded", 3, deep_norm_network, momentum_sgd, shard=shard)
    for device, part, replica in zip(CPUS, strategy.parts, strategy.replicas, strict=False):
        assert devices_of_variables([*part.weights, *part.optimizer.variables]) == {device}
        own = [v for statistics in replica.statistics for v in statistics]
        if shard != "weights":
            own = replica.model.variables
        assert devices_of_variables(own) == {device}


def test_a_replica_computes_on_its_device():
    strategy = create("sharded", 3, deep_network)
    found = devices_of_products(step_graph(strategy, batches(strategy)))
    devices = CPUS[:3]
    assert found["Conv2D"] == found["Conv2DBackpropFilter"] == dict.fromkeys(devices, 1)
    assert found["MatMul"] == dict.fromkeys(devices, 6)


def test_the_model_has_no_values_where_the_weights_are_sharded():
    strategy = create("sharded", 2, deep_network)
    assert strategy.model.count_params() == deep_network().count_params()
    with pytest.raises(AttributeError, match="no value of its own"):
        strategy.model.variables[0].numpy()


# Weights of shards, and accumulation.


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


def test_100_by_3_and_1_is_75_and_25():
    assert [weighted_bounds(100, (3, 1), i) for i in (0, 1)] == [(0, 75), (75, 100)]
