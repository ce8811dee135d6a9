"""Parity, the central test: all strategies are the same training, step by step.

Each comparison is over every weight after every step. What the strategies promise beside is read of
the same trainings.
"""

import functools
import re

import keras
import numpy as np
import pytest
import tensorflow as tf

from app.data.batches import eval_dataset
from app.training.checks import check_all_reduce
from strategies import load_strategy_class
from tests.conftest import CPUS
from tests.small_models import (
    create,
    deep_norm_network,
    lenet,
    momentum_sgd,
    resnet18,
    small_resnet,
)
from tests.strategies.walks import (
    NUM_STEPS,
    ROUNDING,
    assert_close,
    assert_same_bits,
    batches,
    make_images,
    walk,
)
from tests.strategies.walks import Training as t

pytestmark = pytest.mark.parity
BFLOAT16 = 2.0**-8
NORM, SYNC = {"network": deep_norm_network}, {"network": deep_norm_network, "batch_norm": "sync"}


def keras_sgd():
    schedule = keras.optimizers.schedules.CosineDecay(0.1, 10)
    return keras.optimizers.SGD(schedule, momentum=0.9, nesterov=True, weight_decay=0.01)


NESTEROV, BF16 = {"optimizer": keras_sgd}, {"policy": "mixed_bfloat16"}
THREE = {**NORM, "optimizer": momentum_sgd, "label_smoothing": 0.1}
NORM_BF16 = {**THREE, **BF16}


@pytest.fixture(scope="module", autouse=True)
def _released_walks():
    yield
    walk.cache_clear()


def slow(*case):
    """Marks a cell of a table that has a close relative beside it, for `make test-all` only."""
    return pytest.param(*case, marks=pytest.mark.slow)


# A training, and one that is bitwise identical to it.
SAME_BITS = [
    # One replica is one device.
    (t("single", 1), t("manual", 1)),
    slow(t("single", 1), t("mirrored", 1)),
    slow(t("single", 1), t("multi_worker", 1)),
    slow(t("single", 1), t("sharded", 1)),
    # BatchNorm statistics are each replica's own.
    (t("manual", 3, **THREE), t("mirrored", 3, **THREE)),
    (t("manual", 3, **THREE), t("sharded", 3, **THREE)),
    (t("manual", 2, **NORM_BF16), t("mirrored", 2, **NORM_BF16)),
    (t("manual", 2, **NORM_BF16), t("sharded", 2, **NORM_BF16)),
    # More devices than some weights have rows.
    (t("manual", 4, **NESTEROV), t("sharded", 4, **NESTEROV)),
    (t("manual", 2, small_resnet), t("sharded", 2, small_resnet)),
    slow(t("manual", 2, lenet), t("mirrored", 2, lenet)),
    slow(t("manual", 2, resnet18), t("mirrored", 2, resnet18)),
    slow(t("manual", 2, resnet18), t("sharded", 2, resnet18)),
]
# A training, one that equals it within a tolerance, and the tolerance.
CLOSE = [
    (t("single", 1), t("manual", 3), ROUNDING),
    (t("single", 1, **NESTEROV), t("manual", 4, **NESTEROV), 1e-5),
    # BatchNorm over the whole batch; it carries the rounding of a sum further.
    (t("single", 1, **NORM), t("mirrored", 3, **SYNC), 2e-5),
    (t("manual", 3), t("manual", 3, all_reduce="ring"), ROUNDING),
    (t("manual", 3), t("mirrored", 3, all_reduce="ring"), ROUNDING),
]


@pytest.mark.parametrize(("expected", "found"), SAME_BITS, ids=str)
def test_the_same_training_bit_for_bit(expected, found):
    own, other = walk(found), walk(expected)
    assert own.losses == pytest.approx(other.losses, rel=1e-12)
    for state, expected_state in zip(own.states, other.states, strict=True):
        assert_same_bits(state, expected_state)
    for shards, expected_shards in zip(own.statistics, other.statistics, strict=True):
        for a, b in zip(shards, expected_shards, strict=True):
            for array, expected_array in zip(a, b, strict=True):
                np.testing.assert_array_equal(array, expected_array)


@pytest.mark.parametrize(("expected", "found", "tolerance"), CLOSE, ids=str)
def test_the_same_training_within_rounding(expected, found, tolerance):
    own, other = walk(found), walk(expected)
    np.testing.assert_allclose(own.losses, other.losses, rtol=tolerance)
    for state, expected_state in zip(own.states, other.states, strict=True):
        assert_close(state, expected_state, tolerance)


def test_bfloat16_rounds_as_it_does():
    expected, state = (walk(t("manual", 3, **policy)).states[-1] for policy in ({}, BF16))
    assert_close(state, expected, 8 * BFLOAT16)
    with pytest.raises(AssertionError):
        assert_close(state, expected)
    assert {a.dtype for a in state.values()} == {np.dtype("float32"), np.dtype("int64")}


# A walk of each strategy.
EACH = [
    t("single", 1),
    t("manual", 3, **THREE),
    t("mirrored", 3, **THREE),
    t("mirrored", 3, **SYNC),
    t("sharded", 3, **THREE),
]


@pytest.mark.parametrize("walked", EACH, ids=str)
def test_copies_hold_the_same_bits_but_for_their_own_statistics(walked):
    strategy, _, states, statistics, copies = walk(walked)
    is_one = walked.strategy in ("single", "sharded")
    assert len(copies) == strategy.num_copies == (1 if is_one else strategy.num_shards)
    own = set(strategy.states.statistics_names)
    for copy in copies[1:]:
        for name in {*copy} - own:
            np.testing.assert_array_equal(copy[name], copies[0][name], err_msg=name)
    assert states[-1]["optimizer/iteration"] == NUM_STEPS
    if strategy.num_shards == 1 or strategy.syncs_batch_norm or not own:
        assert statistics[-1] == []
    else:  # Each shard has moved its own statistics; the average is read.
        assert len(statistics[-1]) == strategy.num_shards
        for name, *arrays in zip(strategy.states.statistics_names, *statistics[-1], strict=True):
            assert not np.array_equal(arrays[0], arrays[1])
            np.testing.assert_allclose(states[-1][name], np.mean(arrays, axis=0), rtol=1e-6)
    if walked.strategy in ("manual", "mirrored"):
        for copy, device in zip(strategy.copies(), CPUS, strict=False):
            assert devices_of(v for v in copy.values() if v.dtype == tf.float32) == {device}


def devices_of(variables):
    """Returns the devices of variables of TensorFlow or of Keras."""
    variables = [v.value if isinstance(v, keras.Variable) else v for v in variables]
    return {"/device:" + variable.device.rpartition("device:")[2] for variable in variables}


def test_a_device_of_sharded_stores_its_rows_alone():
    strategy = walk(t("sharded", 3, **THREE)).strategy
    for device, rows, optimizer in zip(CPUS, strategy.rows, strategy.optimizers, strict=False):
        assert devices_of([*rows, *optimizer.variables[2:]]) == {device}
    whole = sum(np.prod(weight.shape) for weight in strategy.model.trainable_variables)
    sizes = [sum(np.prod(variable.shape) for variable in rows) for rows in strategy.rows]
    assert sum(sizes) == whole and max(sizes) < whole / 2


@pytest.mark.parametrize("walked", EACH, ids=str)
def test_from_a_saved_state_on_several_steps_in_one_call_are_the_same_steps(walked):
    strategy, losses, states, statistics, copies = walk(walked)
    strategy.load_state(states[2])
    strategy.states.load_per_shard_statistics(statistics[2])
    assert_same_bits(strategy.state(), states[2])
    iterator = batches(strategy, start_step=2)
    totals = [strategy.train_steps(iterator, num_steps) for num_steps in (2, 0)]
    assert totals[0].loss_sum == pytest.approx(losses[2] * 6 + losses[3] * 17, rel=1e-6)
    assert (totals[0].examples, totals[1]) == (23, (0, 0, 0))
    # Of these are the learning rates in records.
    assert keras.ops.convert_to_numpy(strategy.optimizer.iterations) == NUM_STEPS
    assert_same_bits(strategy.state(), states[-1])
    for copy, expected in zip(strategy.states.per_copy(), copies, strict=True):
        assert_same_bits(copy, expected)


@pytest.mark.parametrize("walked", EACH, ids=str)
def test_what_reads_a_strategy_sees_every_example_once_and_changes_nothing(walked):
    strategy, _, states, statistics, copies = walk(walked)
    images, labels = make_images(40)
    # The last of four batches has one example, so that some replicas get none.
    dataset = eval_dataset(images, labels, global_batch_size=13)
    totals = strategy.evaluate(dataset)
    assert strategy.evaluate(dataset) == totals
    check_all_reduce(strategy)
    for copy, expected in zip(strategy.states.per_copy(), copies, strict=True):
        assert_same_bits(copy, expected)
    # The same as one device, to which the state with the shards' average statistics is assigned.
    single = one_device(walked.network, walked.optimizer)
    single.load_state(states[-1])
    expected = single.evaluate(dataset)
    assert totals[1:] == expected[1:] and totals.examples == 40
    assert totals.loss_sum == pytest.approx(expected.loss_sum, rel=1e-5)
    if statistics[-1]:
        apart = [[array + shard for array in own] for shard, own in enumerate(statistics[-1])]
        strategy.states.load_per_shard_statistics(apart)
        single.load_state(strategy.state())
        loss = single.evaluate(dataset).loss
        assert strategy.evaluate(dataset).loss == pytest.approx(loss, rel=1e-5)
        strategy.states.load_per_shard_statistics(statistics[-1])


@functools.cache
def one_device(network, optimizer):
    return create("single", 1, network, optimizer)


def test_a_state_of_another_model_is_refused_by_name():
    strategy, _, states, statistics, _ = walk(t("manual", 3, **THREE))
    (kernel,) = (name for name in states[-1] if re.fullmatch("model/.*conv/kernel", name))
    other = {**states[-1], kernel: np.zeros((2, 2, 1, 3), np.float32)}
    with pytest.raises(ValueError, match=r"conv/kernel: float32\[2, 2, 1, 3\] for float32\[5"):
        strategy.load_state(other)
    with pytest.raises(ValueError, match="nothing"):
        strategy.load_state(dict(list(states[-1].items())[:-1]))
    with pytest.raises(ValueError, match="statistics of 2 replicas instead of 3"):
        strategy.states.load_per_shard_statistics(statistics[-1][:2])
    with pytest.raises(ValueError, match="those of another model"):
        strategy.states.load_per_shard_statistics([own[:-1] for own in statistics[-1]])


@pytest.mark.parametrize("name", ["single", "manual"])
def test_the_gradient_is_that_of_the_mean_over_the_batch(name):
    """Two weights, three examples, by hand: logits w · x, of which the label is the second."""

    def model_fn():
        images = keras.Input((1, 1, 1), dtype="uint8")
        features = keras.layers.Rescaling(1.0)(keras.layers.Flatten()(images))
        logits = keras.layers.Dense(2, use_bias=False, kernel_initializer="zeros")(features)
        return keras.Model(images, logits)

    num_replicas = 1 if name == "single" else 2
    strategy = create(name, num_replicas, model_fn, lambda: keras.optimizers.SGD(1.0))
    # d/dw of −log softmax at w = 0: ∓x / 2 for the right and the wrong class; the mean over
    # examples 1, 2, 4 with labels 0, 1, 1 is (−1 + 2 + 4) / 6 = 5/6 for the first weight.
    features = np.array([1, 2, 4], np.uint8).reshape(3, 1, 1, 1)
    dataset = eval_dataset(features, np.array([0, 1, 1]), global_batch_size=3)
    totals = strategy.train_steps(strategy.distribute(dataset.repeat()), 1)
    weights = strategy.state()[f"model/{strategy.model.trainable_variables[0].path}"]
    np.testing.assert_allclose(weights, [[-5 / 6, 5 / 6]], rtol=1e-6)
    np.testing.assert_allclose(totals.loss, np.log(2), rtol=1e-6)
    assert (totals.examples, totals.accuracy) == (3, 1 / 3)


@pytest.mark.parametrize("network", [lenet, pytest.param(resnet18, marks=pytest.mark.slow)])
def test_real_networks_with_empty_shards(network):
    """Their fused kernels fail on an empty batch."""
    strategy = create("manual", 3, network)  # 1, 1, 1 and then 1, 0, 0.
    totals = strategy.evaluate(eval_dataset(*make_images(4), global_batch_size=3))
    assert totals.examples == 4 and np.isfinite(totals.loss)


def test_devices_and_options_that_do_not_fit_the_strategy_are_refused():
    with pytest.raises(ValueError, match="needs one device, got 2"):
        load_strategy_class("single")(CPUS[:2])
    with pytest.raises(ValueError, match="strategy sharded must be one of auto, got ring"):
        load_strategy_class("sharded")(CPUS[:2], all_reduce="ring")
