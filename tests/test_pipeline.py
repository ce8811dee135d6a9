"""Tests pipeline parallelism: M micro-batches are bitwise identical to M replicas, on K stages."""

import functools
import itertools

import keras
import numpy as np
import pytest

from app.data.input_pipeline import eval_dataset, train_dataset
from app.training.optimizers import ScaledSGD
from conftest import CPUS
from placement import devices_of_products, devices_of_variables
from small_models import (
    build_network,
    create,
    deep_network,
    deep_norm_network,
    momentum_sgd,
    small_resnet,
)
from strategies.cuts import cut, cut_points, stage_flops
from strategies.flops import forward_flops, product_layers
from strategies.layer_calls import LayerCalls
from strategies.pipeline import PipelineStrategy
from strategies.schedules import SCHEDULES
from test_strategies import assert_same_bits, walk

LENET_CUTS = ["conv1", "average_pooling2d", "conv2", "average_pooling2d_1", "flatten", "hidden"]


@pytest.fixture
def lenet():
    keras.utils.clear_session()
    return build_network("lenet")


@pytest.fixture(scope="module")
def resnet18():
    return build_network("resnet18")


def names_of_cuts(model):
    calls = LayerCalls.of(model)
    return [calls.calls[point].layer.name for point in cut_points(calls)]


def network_with_dropout():
    network = deep_network()
    layers = [
        *network.layers[:-1],
        keras.layers.Dropout(0.5, seed=3, name="drop"),
        network.layers[-1],
    ]
    return keras.Sequential([keras.Input(network.input_shape[1:], dtype="uint8"), *layers])


def test_activations_that_are_computed_again_have_the_same_dropout(images):
    """Were another mask drawn, the gradients would be those of another loss."""
    states = []
    for recompute in (False, True):
        strategy = create(
            "pipeline", 2, network_with_dropout, micro_batches=2, recompute=recompute,
            pipeline_cuts=("drop",),
        )  # fmt: skip
        state = walk(strategy, images, global_batch_size=16)[1][-1]
        states.append({name: a for name, a in state.items() if "seed" not in name})
    assert_same_bits(*states)


def test_every_micro_batch_goes_on_with_the_random_state_that_was_saved(images):
    trained, resumed = (
        create("pipeline", 2, network_with_dropout, micro_batches=2) for _ in range(2)
    )
    walk(trained, images, global_batch_size=16)
    resumed.load_state(trained.state())
    for own, saved in zip(resumed.shard_variables(), trained.shard_variables(), strict=True):
        assert len(own) == len(saved) == 1  # Keras numbers the random states of a process.
        for mine, other in zip(own.values(), saved.values(), strict=True):
            np.testing.assert_array_equal(mine.numpy(), other.numpy())
            assert mine.numpy()[1] > 0


# Where a network can be cut.


def test_lenet_can_be_cut_in_six_places(lenet):
    assert names_of_cuts(lenet) == LENET_CUTS


def test_resnet18_can_be_cut_in_twenty_places(resnet18):
    names = names_of_cuts(resnet18)
    assert len(names) == 20
    assert names[:2] == ["stem_conv", "stem_norm"]
    # Within a block its input is alive, too: a block is cut after its sum and after its ReLU.
    assert not any(name.endswith(("conv1", "conv2", "norm1", "norm2")) for name in names)


@pytest.mark.parametrize("num_stages", range(1, 8))
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


def test_cuts_of_resnet18(resnet18):
    """A pipeline does not halve a convolutional network's memory: two thirds are arithmetic."""
    stages = cut(LayerCalls.of(resnet18), 2)
    flops = np.array([stage_flops(stage) for stage in stages])
    assert 0.45 < flops[0] / flops.sum() < 0.5
    weights = [sum(c.layer.count_params() for c in stage) for stage in stages]
    assert weights[0] / sum(weights) < 0.1  # The first layers have few weights,
    outputs = [sum(np.prod(c.layer.output.shape[1:]) for c in stage) for stage in stages]
    assert outputs[0] / sum(outputs) > 0.7  # and most of the activations.


def test_the_arithmetic_of_all_stages_is_that_of_the_model(lenet):
    calls = LayerCalls.of(lenet)
    assert stage_flops(calls.calls) == sum(map(forward_flops, product_layers(lenet)))


def test_cuts_by_name(lenet):
    stages = cut(LayerCalls.of(lenet), 3, ("average_pooling2d", "hidden"))
    assert [stage[-1].layer.name for stage in stages] == [
        "average_pooling2d", "hidden", "logits",
    ]  # fmt: skip


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


def test_more_stages_than_cuts_are_refused_by_build():
    with pytest.raises(ValueError, match="4 stages need 3 cuts"):
        create("pipeline", 4, lambda: one_dense_layer())


def one_dense_layer():
    images = keras.Input((28, 28, 1), dtype="uint8")
    flat = keras.layers.Flatten()(keras.layers.Rescaling(1 / 255)(images))
    return keras.Model(images, keras.layers.Dense(10, name="logits")(flat))


def test_devices_that_do_not_divide_are_refused():
    with pytest.raises(ValueError, match="--model_parallel=3 must divide the 4 devices"):
        PipelineStrategy(CPUS, model_parallel=3)


# The same training.


@pytest.fixture(scope="module")
def four_replicas():
    generator = np.random.default_rng(0)
    pixels = generator.integers(0, 256, (40, 28, 28, 1), dtype=np.uint8)
    images = pixels, (np.arange(40) % 10).astype(np.uint8)
    strategy = create("manual", 4, deep_network, momentum_sgd)
    return images, walk(strategy, images, global_batch_size=18, num_steps=3)


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_four_micro_batches_are_four_replicas(four_replicas, schedule, recompute):
    """Uneven: 18 examples over 4, and a last batch of 4."""
    images, manual = four_replicas
    pipeline = create(
        "pipeline", 4, deep_network, momentum_sgd,
        micro_batches=4, schedule=schedule, recompute=recompute,
    )  # fmt: skip
    losses, states = walk(pipeline, images, global_batch_size=18, num_steps=3)
    assert losses == manual[0]
    for state, expected in zip(states, manual[1], strict=True):
        assert_same_bits(state, expected)


@pytest.mark.parametrize("recompute", [False, True])
def test_each_micro_batch_has_batch_norm_statistics_of_its_own(images, recompute):
    manual = create("manual", 3, deep_norm_network)
    pipeline = create("pipeline", 3, deep_norm_network, micro_batches=3, recompute=recompute)
    options = {"global_batch_size": 16, "num_steps": 2}
    assert walk(pipeline, images, **options)[0] == walk(manual, images, **options)[0]
    assert_same_bits(pipeline.state(), manual.state())
    expected = manual.per_shard_statistics()
    assert len(expected) == 3
    for own, arrays in zip(pipeline.per_shard_statistics(), expected, strict=True):
        for a, b in zip(own, arrays, strict=True):
            np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("build", [deep_network, deep_norm_network])
def test_one_micro_batch_is_one_device(images, build):
    single = walk(create("single", 1, build), images, global_batch_size=17, num_steps=2)
    pipeline = walk(
        create("pipeline", 3, build, micro_batches=1), images, global_batch_size=17, num_steps=2
    )
    assert pipeline[0] == single[0]
    assert_same_bits(pipeline[1][-1], single[1][-1])


def test_stages_of_residual_blocks(images):
    manual = walk(create("manual", 2, small_resnet), images, global_batch_size=17, num_steps=2)
    pipeline = walk(
        create("pipeline", 3, small_resnet, micro_batches=2), images,
        global_batch_size=17, num_steps=2,
    )  # fmt: skip
    assert pipeline[0] == manual[0]
    assert_same_bits(pipeline[1][-1], manual[1][-1])


def test_two_pipelines_of_two_stages_are_two_replicas_that_accumulate(images):
    """Each adds its own micro-batches first: (0 + 1) + (2 + 3), not ((0 + 1) + 2) + 3."""
    options = {"global_batch_size": 18, "num_steps": 2}
    pipeline = create("pipeline", 4, deep_network, micro_batches=2, model_parallel=2)
    assert (pipeline.num_replicas, pipeline.num_shards, pipeline.num_copies) == (2, 4, 2)
    _, states = walk(pipeline, images, **options)
    accumulated = create("manual", 2, deep_network, accumulate_steps=2)
    assert_same_bits(states[-1], walk(accumulated, images, **options)[1][-1])
    first, second = pipeline.copy_states()
    assert_same_bits(first, second)


@pytest.mark.parametrize("policy", ["mixed_bfloat16", "mixed_float16"])
@pytest.mark.parametrize("name", ["pipeline", "sharded"])
def test_mixed_precision_is_the_same_training(images, name, policy):
    """Activations of 16 bits travel, and their gradients; the loss scale is a power of two."""
    scaled = functools.partial(ScaledSGD, 0.1, initial_scale=1024.0)
    options = {"optimizer_fn": scaled} if policy == "mixed_float16" else {}
    own = {"micro_batches": 3} if name == "pipeline" else {}
    keras.config.set_dtype_policy(policy)
    try:
        manual = create("manual", 3, deep_network, **options)
        other = create(name, 3, deep_network, **options, **own)
        expected, found = (
            walk(s, images, global_batch_size=17, num_steps=2) for s in (manual, other)
        )
    finally:
        keras.config.set_dtype_policy("float32")
    assert found[0] == expected[0]
    assert_same_bits(found[1][-1], expected[1][-1])


def test_cuts_make_no_difference(images):
    options = {"global_batch_size": 18, "num_steps": 2}
    first, second = (
        walk(create("pipeline", 2, deep_network, pipeline_cuts=cuts), images, **options)[1][-1]
        for cuts in [("conv",), ("hidden",)]
    )
    assert_same_bits(first, second)


# Where things are.


def test_every_variable_is_on_the_device_of_its_stage():
    strategy = create("pipeline", 4, deep_network, momentum_sgd, model_parallel=2, micro_batches=2)
    for r, pipeline in enumerate(strategy.pipelines):
        for k, stage in enumerate(pipeline.stages):
            own = [*stage.weights, *itertools.chain(*stage.statistics), *stage.optimizer.variables]
            assert devices_of_variables(own) == {CPUS[2 * r + k]}
    # Between them they have all weights once.
    paths = [path for stage in strategy.pipelines[0].stages for path in stage.weight_paths]
    assert sorted(paths) == sorted(v.path for v in strategy.model.trainable_variables)


@pytest.mark.parametrize("recompute", [False, True])
def test_a_stage_computes_on_its_device(images, recompute):
    """Forward and backward passes: a tape places the latter by the scope of `.gradient`."""
    strategy = create(
        "pipeline", 2, deep_network, micro_batches=3, recompute=recompute, pipeline_cuts=("flat",)
    )
    dataset = train_dataset(*images, seed=3, global_batch_size=18)
    iterator = strategy.distribute(dataset)
    found = devices_of_products(strategy, iterator)
    passes = 2 if recompute else 1
    # The images need no gradient: a convolution forwards, and backwards by its filter.
    assert found["Conv2D"] == {CPUS[0]: 3 * passes}
    assert found["Conv2DBackpropFilter"] == {CPUS[0]: 3}
    # Two dense layers: forwards, and backwards by input and by weights; the last stage, whose
    # forward and backward passes follow each other, has nothing to compute again.
    assert found["MatMul"] == {CPUS[1]: 3 * 2 * 3}


def test_the_model_has_shapes_and_no_values():
    strategy = create("pipeline", 2, deep_network)
    assert strategy.model.count_params() == deep_network().count_params()
    with pytest.raises(AttributeError, match="conv/kernel has no value of its own"):
        strategy.model.trainable_variables[0].numpy()


def test_a_pipeline_of_one_stage_accumulates(images):
    options = {"global_batch_size": 18, "num_steps": 2}
    pipeline = walk(create("pipeline", 1, deep_network, micro_batches=3), images, **options)
    single = walk(create("single", 1, deep_network, accumulate_steps=3), images, **options)
    assert pipeline[0] == single[0]
    assert_same_bits(pipeline[1][-1], single[1][-1])


def test_fewer_examples_than_micro_batches_are_evaluated(images):
    """Evaluation has no micro-batches; a batch may be smaller than their number."""
    strategy = create("pipeline", 2, deep_network, micro_batches=8)
    totals = strategy.evaluate(eval_dataset(*images, global_batch_size=3))
    assert totals.examples == 40
