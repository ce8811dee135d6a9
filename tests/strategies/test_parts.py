"""Which device holds and computes what, where layers are cut, split and gathered."""

import itertools

import keras
import numpy as np
import pytest
import tensorflow as tf

from strategies.collectives import shard_sizes
from strategies.cuts import cut, cut_points, forward_flops, product_layers, stage_flops
from strategies.device_tape import DeviceTape
from strategies.layer_calls import LayerCalls
from strategies.parts import WholeVariable
from strategies.sharded import SHARD_CHOICES
from strategies.sync_batch_norm import _combined
from strategies.tf_private import reset_layer_numbers
from tests.conftest import CPUS
from tests.small_models import (
    build_network,
    create,
    deep_network,
    deep_norm_network,
    momentum_sgd,
)
from tests.strategies.placement import devices_of_products, devices_of_variables, step_graph
from tests.strategies.walks import batches

# Where variables are, and which device computes what.


@pytest.mark.parametrize("shard", SHARD_CHOICES)
def test_only_what_is_sharded_is_in_parts_each_on_its_device(shard):
    strategy = create("sharded", 3, deep_norm_network, momentum_sgd, shard=shard)
    whole = create("single", 1, deep_norm_network, momentum_sgd).state()
    assert strategy.num_copies == len(strategy.copies()) == (1 if shard == "weights" else 3)
    for copy in strategy.copies():
        for name, variable in copy.items():
            in_parts = isinstance(variable, WholeVariable)
            is_statistic = name in strategy.states.statistics_names
            is_sharded = (shard == "weights" and not is_statistic) or name.startswith("optimizer/")
            assert in_parts == is_sharded, name
            if in_parts and variable.axis is not None:  # 1/R, but for a rest of one element.
                sizes = [int(tf.size(part)) for part in variable.parts]
                assert sizes == shard_sizes(whole[name].size, 3)
            else:  # The step and the learning rate are whole.
                assert not in_parts or whole[name].size == 1
    for device, part, replica in zip(CPUS, strategy.parts, strategy.replicas, strict=False):
        own = [v for statistics in replica.statistics for v in statistics.values()]
        if shard != "weights":
            own = replica.model.variables
        for variables in (own, part.weights.values(), part.optimizer.variables):
            assert devices_of_variables(variables) == {device}
    if shard == "weights":
        with pytest.raises(AttributeError, match="conv/kernel has no value of its own"):
            strategy.model.trainable_variables[0].numpy()


def test_every_stage_and_every_channel_is_on_the_device_of_its_part():
    pipeline = create("pipeline", 4, deep_network, momentum_sgd, model_parallel=2, micro_batches=2)
    tensor = create("tensor", 4, deep_norm_network, model_parallel=2)
    for strategy in (pipeline, tensor):
        assert len(strategy.parts) == strategy.num_replicas == 2
        for r, parts in enumerate(strategy.parts):
            for k, part in enumerate(parts):
                statistics = [v for shard in part.statistics for v in shard.values()]
                own = [*part.weights.values(), *statistics, *part.optimizer.variables]
                assert devices_of_variables(own) == {CPUS[2 * r + k]}
        with pytest.raises(AttributeError, match="conv/kernel has no value of its own"):
            strategy.model.trainable_variables[0].numpy()
    # Between them the stages have all weights once.
    paths = [path for part in pipeline.parts[0] for path in part.weights]
    assert sorted(paths) == sorted(v.path for v in pipeline.model.trainable_variables)
    for parts in tensor.parts:
        assert all(list(part.weights) == tensor.weight_paths for part in parts)


def test_parts_of_channels_make_up_the_weights():
    strategy = create("tensor", 4, deep_norm_network)
    whole = create("single", 1, deep_norm_network).state()
    for name, variable in strategy.copies()[0].items():
        if variable.axis is None:
            continue
        joined = np.concatenate([part.numpy() for part in variable.parts], axis=-1)
        np.testing.assert_array_equal(joined, whole[name])
        sizes = [part.shape[-1] for part in variable.parts]
        assert max(sizes) - min(sizes) <= 1
        assert [devices_of_variables([part]) for part in variable.parts] == [{d} for d in CPUS]


@pytest.mark.parametrize("name", ["sharded", "tensor"])
def test_a_part_is_computed_on_its_device_and_no_more_than_a_part(name):
    strategy = create(name, 3, deep_network)
    graph = step_graph(strategy, batches(strategy))
    found, devices = devices_of_products(graph), CPUS[:3]
    assert found["Conv2D"] == found["Conv2DBackpropFilter"] == dict.fromkeys(devices, 1)
    # Two dense layers: forwards, backwards by input and by weights.
    assert found["MatMul"] == dict.fromkeys(devices, 6)
    filters = [op.inputs[1].shape[-1] for op in graph.get_operations() if op.type == "Conv2D"]
    assert sorted(filters) == ([1, 2, 2] if name == "tensor" else [5, 5, 5])


@pytest.mark.parametrize("recompute", [False, True])
def test_a_stage_computes_on_its_device(recompute):
    """Forward and backward passes: a tape places the latter by the scope of `.gradient`."""
    strategy = create(
        "pipeline", 2, deep_network, micro_batches=3, recompute=recompute, pipeline_cuts=("flat",)
    )
    found = devices_of_products(step_graph(strategy, batches(strategy)))
    passes = 2 if recompute else 1
    # The images need no gradient: a convolution forwards, and backwards by its filter.
    assert found["Conv2D"] == {CPUS[0]: 3 * passes}
    assert found["Conv2DBackpropFilter"] == {CPUS[0]: 3}
    # Two dense layers: forwards, and backwards by input and by weights; the last stage, whose
    # forward and backward passes follow each other, has nothing to compute again.
    assert found["MatMul"] == {CPUS[1]: 3 * 2 * 3}


# Where a network can be cut.


@pytest.fixture(scope="module")
def lenet():
    reset_layer_numbers()
    return build_network("lenet")


def test_cuts_of_lenet(lenet):
    calls = LayerCalls.of(lenet)
    assert [calls.calls[point].layer.name for point in cut_points(calls)] == [
        "conv1", "average_pooling2d", "conv2", "average_pooling2d_1", "flatten", "hidden",
    ]  # fmt: skip
    assert stage_flops(calls.calls) == sum(map(forward_flops, product_layers(lenet)))
    stages = cut(calls, 3, ("average_pooling2d", "hidden"))
    last = [stage[-1].layer.name for stage in stages]
    assert last == ["average_pooling2d", "hidden", "logits"]


@pytest.mark.parametrize("num_stages", [1, 3, 7])
def test_cuts_balance_the_arithmetic(lenet, num_stages):
    """No other cuts have less of it in the stage with most: all are tried."""
    calls = LayerCalls.of(lenet)
    stages = cut(calls, num_stages)
    assert [call for stage in stages for call in stage] == calls.calls
    tried = []
    for points in itertools.combinations(cut_points(calls), num_stages - 1):
        bounds = [0, *(point + 1 for point in points), len(calls.calls)]
        tried.append(max(stage_flops(calls.calls[a:b]) for a, b in itertools.pairwise(bounds)))
    assert max(map(stage_flops, stages)) == min(tried)


def test_cuts_of_resnet18():
    calls = LayerCalls.of(build_network("resnet18"))
    names = [calls.calls[point].layer.name for point in cut_points(calls)]
    assert len(names) == 20 and names[:2] == ["stem_conv", "stem_norm"]
    # Within a block its input is alive, too: a block is cut after its sum and after its ReLU.
    assert not any(name.endswith(("conv1", "conv2", "norm1", "norm2")) for name in names)
    flops = [stage_flops(stage) for stage in cut(calls, 2)]
    assert 0.45 < flops[0] / sum(flops) < 0.5


@pytest.mark.parametrize(
    ("num_stages", "cuts", "told"),
    [
        (8, (), r"8 stages need 7 cuts, and the network can be cut in 6 places, after conv1, .*"
                "; use --model_parallel=7 or less"),
        (3, ("conv1",), "--pipeline_cuts=conv1 must name 2 of the layers .*: conv1, average"),
        (2, ("logits",), "--pipeline_cuts=logits must name 1 of"),
        (3, ("hidden", "conv1"), "--pipeline_cuts=hidden,conv1 must be in the order"),
        (3, ("conv1", "conv1"), "--pipeline_cuts=conv1,conv1 must be in the order"),
    ],
)  # fmt: skip
def test_cuts_that_cannot_be_are_refused(lenet, num_stages, cuts, told):
    with pytest.raises(ValueError, match=told):
        cut(LayerCalls.of(lenet), num_stages, cuts)


# What cannot be split.


CONV, FLAT = keras.layers.Conv2D(4, 3), keras.layers.Flatten()


def network(*layers):
    return keras.Sequential(
        [
            keras.Input((28, 28, 1), dtype="uint8"), keras.layers.Rescaling(1 / 255), *layers,
            keras.layers.Flatten(), keras.layers.Dense(10),
        ],
    )  # fmt: skip


@pytest.mark.parametrize(
    ("name", "options", "layers", "told"),
    [
        ("tensor", {}, [keras.layers.LayerNormalization(name="odd")], "cannot be split"),
        ("tensor", {}, [CONV, keras.layers.Conv2D(4, 3, groups=2, name="odd")], "cannot be split"),
        ("tensor", {}, [CONV, keras.layers.BatchNormalization(axis=1, name="odd")], "cannot be sp"),
        ("tensor", {}, [FLAT, keras.layers.BatchNormalization(name="odd")], "cannot be split"),
        ("tensor", {}, [keras.layers.Conv2D(4, 3, activation="softmax", name="odd")], "cannot be"),
        ("tensor", {}, [CONV, keras.layers.Activation("softmax", name="odd")], "cannot be split"),
        ("tensor", {}, [keras.layers.Conv2D(1, 3, name="odd")], "has 1 channels, too few for 2"),
        ("manual", {"batch_norm": "sync"}, [keras.layers.BatchNormalization(axis=1, name="odd")],
         "--batch_norm=sync needs BatchNorm layers"),
    ],
)  # fmt: skip
def test_layers_that_cannot_be_split_are_refused(name, options, layers, told):
    with pytest.raises(ValueError, match=f"layer odd.*{told}"):
        create(name, 2, lambda: network(*layers), **options)


# The tape.


@pytest.mark.parametrize(
    ("function", "expected"), [(lambda d, a: a * a, [7.0, 11.0]), (None, [2.0, 2.0])]
)
def test_gradients_of_a_value_that_is_used_twice_are_added(function, expected):
    """x + x² has the gradient 1 + 2 x. A value that one function takes twice has one gradient."""
    tape, factors = DeviceTape(CPUS[:2]), [[tf.constant(3.0)], [tf.constant(5.0)]]
    x = tape.each(lambda d, v: v * factors[d][0], [[tf.constant(1.0)] * 2], factors)
    other = tape.each(function, [x]) if function else x
    total = tape.each(lambda d, a, b: a + b, [x, other])
    gradients = tape.gradient(total, [tf.constant(1.0)] * 2, factors)
    assert [float(g) for (g,) in gradients] == expected


# Variables of which several devices have a part.


def on(devices, arrays):
    variables = []
    for device, array in zip(devices, arrays, strict=True):
        with tf.device(device):
            variables.append(tf.Variable(array))
    return variables


def test_variables_of_few_elements():
    """Of 2 elements over 3 devices one has none; a scalar is repeated."""
    variable = WholeVariable(on(CPUS[:3], np.array_split(np.float32([1, 2]), 3)), 0, (2,))
    variable.assign(np.float32([3, 4]))
    assert variable.numpy().tolist() == [3, 4]
    assert [part.shape[0] for part in variable.parts] == [1, 1, 0]
    scalar = WholeVariable(on(CPUS[:3], [np.int64(1)] * 3))
    scalar.assign(np.int64(5))
    assert (scalar.shape, scalar.dtype, scalar.numpy()) == (tf.TensorShape([]), tf.int64, 5)
    assert [int(copy) for copy in scalar.parts] == [5, 5, 5]


# BatchNorm over the whole global batch.


@pytest.mark.parametrize("offset", [0.0, 1000.0])
def test_moments_of_parts_are_those_of_the_whole(offset):
    """Uneven parts; far from 0 a mean of squares would lose all digits in float32."""
    x = np.random.default_rng(0).normal(offset, 0.1, (17, 3)).astype(np.float32)
    moments = [
        tf.stack(
            [tf.fill([3], float(len(part))), part.mean(0), np.square(part - part.mean(0)).sum(0)]
        )
        for part in (x[:11], x[11:15], x[15:])
    ]
    mean, variance = _combined(moments)
    np.testing.assert_allclose(mean, x.astype(np.float64).mean(0), rtol=1e-6)
    np.testing.assert_allclose(variance, x.astype(np.float64).var(0), rtol=1e-3)
