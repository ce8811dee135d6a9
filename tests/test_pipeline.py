"""Stages of a pipeline: where a network is cut, and which device computes what."""

import itertools

import keras
import numpy as np
import pytest

from app.data.input_pipeline import eval_dataset
from conftest import CPUS
from placement import devices_of_products, devices_of_variables, step_graph
from small_models import build_network, create, deep_network, momentum_sgd, network_with_dropout
from strategies.cuts import cut, cut_points, stage_flops
from strategies.flops import forward_flops, product_layers
from strategies.layer_calls import LayerCalls
from strategies.tf_private import reset_layer_numbers
from walks import batches, make_images

LENET_CUTS = ["conv1", "average_pooling2d", "conv2", "average_pooling2d_1", "flatten", "hidden"]


@pytest.fixture(scope="module")
def lenet():
    reset_layer_numbers()
    return build_network("lenet")


@pytest.fixture(scope="module")
def resnet18():
    return build_network("resnet18")


def names_of_cuts(model):
    calls = LayerCalls.of(model)
    return [calls.calls[point].layer.name for point in cut_points(calls)]


# Where a network can be cut.


def test_lenet_can_be_cut_in_six_places(lenet):
    assert names_of_cuts(lenet) == LENET_CUTS


def test_resnet18_can_be_cut_in_twenty_places(resnet18):
    names = names_of_cuts(resnet18)
    assert len(names) == 20
    assert names[:2] == ["stem_conv", "stem_norm"]
    # Within a block its input is alive, too: a block is cut after its sum and after its ReLU.
    assert not any(name.endswith(("conv1", "conv2", "norm1", "norm2")) for name in names)


@pytest.mark.parametrize("num_stages", [1, 3, 4, 7])
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


def test_every_micro_batch_goes_on_with_the_random_state_that_was_saved():
    trained, resumed = (
        create("pipeline", 2, network_with_dropout, micro_batches=2) for _ in range(2)
    )
    trained.train_steps(batches(trained), 2)
    resumed.load_state(trained.state())
    saved = trained.shard_variables()[0]
    assert len(saved) == 1 and next(iter(saved.values())).numpy()[1] > 0
    for own in resumed.shard_variables():
        np.testing.assert_array_equal(*(next(iter(v.values())).numpy() for v in (own, saved)))


def test_fewer_examples_than_micro_batches_are_evaluated():
    """Evaluation has no micro-batches; a batch may be smaller than their number."""
    strategy = create("pipeline", 2, deep_network, micro_batches=8)
    dataset = eval_dataset(*make_images(7), global_batch_size=3)
    assert strategy.evaluate(dataset).examples == 7
