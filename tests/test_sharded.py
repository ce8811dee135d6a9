"""Tests sharded state: bitwise identical to `manual`, with one part on each device."""

import numpy as np
import pytest
import tensorflow as tf

from app.data.input_pipeline import train_dataset
from conftest import CPUS
from placement import devices_of_products, devices_of_variables
from small_models import create, deep_network, deep_norm_network, momentum_sgd, small_resnet
from strategies.collectives import shard_bounds, shard_sizes, weighted_bounds
from strategies.gather_scatter import all_gather, reduce_scatter
from strategies.sharded import SHARD_CHOICES
from strategies.split_variable import RepeatedVariable, SplitVariable
from test_strategies import assert_same_bits, walk

OPTIONS = {"global_batch_size": 17, "num_steps": 2}


@pytest.fixture(scope="module")
def manual_walk():
    generator = np.random.default_rng(0)
    pixels = generator.integers(0, 256, (40, 28, 28, 1), dtype=np.uint8)
    images = pixels, (np.arange(40) % 10).astype(np.uint8)
    strategy = create("manual", 3, deep_norm_network, momentum_sgd)
    return images, *walk(strategy, images, **OPTIONS), strategy.per_shard_statistics()


@pytest.mark.parametrize("shard", SHARD_CHOICES)
def test_parts_of_the_state_are_the_same_training(manual_walk, shard):
    """17 over 3 are 6, 6, 5; momentum, and BatchNorm statistics of each replica's own."""
    images, losses, states, statistics = manual_walk
    strategy = create("sharded", 3, deep_norm_network, momentum_sgd, shard=shard)
    own_losses, own_states = walk(strategy, images, **OPTIONS)
    assert own_losses == losses
    for state, expected in zip(own_states, states, strict=True):
        assert_same_bits(state, expected)
    for own, arrays in zip(strategy.per_shard_statistics(), statistics, strict=True):
        for a, b in zip(own, arrays, strict=True):
            np.testing.assert_array_equal(a, b)


def test_sharded_residual_blocks_are_the_same_training(images):
    states = [
        walk(create(n, 2, small_resnet), images, **OPTIONS)[1][-1] for n in ("manual", "sharded")
    ]
    assert_same_bits(*states)


@pytest.mark.parametrize("num_devices", [1, 2, 3, 4])
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


def test_a_replica_computes_on_its_device(images):
    strategy = create("sharded", 3, deep_network)
    found = devices_of_products(
        strategy, strategy.distribute(train_dataset(*images, seed=3, global_batch_size=18))
    )
    devices = CPUS[:3]
    assert found["Conv2D"] == found["Conv2DBackpropFilter"] == dict.fromkeys(devices, 1)
    assert found["MatMul"] == dict.fromkeys(devices, 6)


@pytest.mark.parametrize("shard", SHARD_CHOICES)
def test_a_state_that_was_loaded_is_trained_on(images, shard):
    """Parts and whole copies are both assigned: where they differ, the next update undoes one."""
    manual = create("manual", 2, deep_network, momentum_sgd)
    sharded = create("sharded", 2, deep_network, momentum_sgd, shard=shard)
    walk(manual, images, global_batch_size=15, num_steps=2)
    sharded.load_state(manual.state())
    first, second = (walk(s, images, global_batch_size=15, num_steps=1) for s in (manual, sharded))
    assert first[0] == second[0]
    assert_same_bits(first[1][0], second[1][0])


def test_the_model_has_no_values_where_the_weights_are_sharded():
    strategy = create("sharded", 2, deep_network)
    assert strategy.model.count_params() == deep_network().count_params()
    with pytest.raises(AttributeError, match="no value of its own"):
        strategy.model.variables[0].numpy()


# Gather and scatter.


def whole_numbers(num_devices, shape):
    """A tensor of each device; all sums of them are exact."""
    generator, tensors = np.random.default_rng(1), []
    for device in CPUS[:num_devices]:
        with tf.device(device):
            tensors.append(tf.constant(generator.integers(-99, 99, shape), tf.float32))
    return tensors


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("num_devices", [1, 2, 3, 4])
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


@pytest.mark.parametrize("num_devices", [2, 3])
def test_powers_of_two_tell_who_is_in_a_sum(num_devices):
    tensors = [tf.fill([num_devices], float(2**i)) for i in range(num_devices)]
    parts = reduce_scatter(tensors, [1] * num_devices, CPUS[:num_devices])
    assert [part.numpy().tolist() for part in parts] == [[2.0**num_devices - 1]] * num_devices


def test_its_all_reduce_is_a_sum_on_every_device():
    strategy = create("sharded", 3, deep_network)
    tensors = [[t, t[0]] for t in whole_numbers(3, (4, 5))]
    total = np.sum([t.numpy() for t, _ in tensors], axis=0)
    for r, (matrix, row) in enumerate(strategy.all_reduce(tensors)):
        np.testing.assert_array_equal(matrix.numpy(), total)
        np.testing.assert_array_equal(row.numpy(), total[0])
        assert matrix.device.endswith(CPUS[r])


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


@pytest.mark.parametrize("name", ["mirrored", "sharded"])
def test_weighted_shards_are_the_same_training(images, name):
    """The loss is divided by the whole batch: shards of any sizes add up to one device."""
    weights = {"shard_weights": (3, 1)}
    _, manual = walk(create("manual", 2, deep_network, **weights), images, **OPTIONS)
    _, other = walk(create(name, 2, deep_network, **weights), images, **OPTIONS)
    _, single = walk(create("single", 1, deep_network), images, **OPTIONS)
    assert_same_bits(other[-1], manual[-1])
    for key, value in single[-1].items():
        np.testing.assert_allclose(manual[-1][key], value, rtol=5e-6, atol=5e-6, err_msg=key)


@pytest.mark.parametrize("weights", [(1,), (1, 1, 1)])
def test_a_weight_for_each_replica_is_required(weights):
    with pytest.raises(ValueError, match="must have a weight for each of 2 replicas"):
        create("manual", 2, shard_weights=weights)


@pytest.mark.parametrize("name", ["single", "manual"])
def test_accumulated_shards_are_replicas(images, name):
    """Three shards one after another on one device, or one on each of three."""
    manual = create("manual", 3, deep_norm_network)
    accumulated = create(name, 1, deep_norm_network, accumulate_steps=3)
    assert (accumulated.num_replicas, accumulated.num_shards) == (1, 3)
    expected, found = (walk(s, images, **OPTIONS) for s in (manual, accumulated))
    assert found[0] == expected[0]
    assert_same_bits(found[1][-1], expected[1][-1])


@pytest.mark.parametrize("name", ["mirrored", "sharded"])
def test_accumulation_on_several_devices_is_the_same_everywhere(images, name):
    options = {"accumulate_steps": 2, "shard_weights": (2, 1)}
    expected, found = (
        walk(create(n, 2, deep_norm_network, **options), images, **OPTIONS)
        for n in ("manual", name)
    )
    assert found[0] == expected[0]
    assert_same_bits(found[1][-1], expected[1][-1])


def test_accumulation_is_one_update(images):
    accumulated = create("manual", 2, deep_network, accumulate_steps=3)
    state = walk(accumulated, images, **OPTIONS)[1][-1]
    assert state["optimizer/iteration"] == OPTIONS["num_steps"]
    single = walk(create("single", 1, deep_network), images, **OPTIONS)[1][-1]
    for key, value in single.items():
        np.testing.assert_allclose(state[key], value, rtol=5e-6, atol=5e-6, err_msg=key)
