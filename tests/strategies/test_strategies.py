"""Parity, the central test: all strategies are the same training, step by step.

`mirrored` must hold the same *bits* as `manual`; both stay within rounding of `single`, whose sums
run over the whole batch at once. Each comparison is over every weight after every step. What the
strategies promise beside is read of the same trainings.
"""

import functools
import itertools

import keras
import numpy as np
import pytest
import tensorflow as tf

from app.data.input_pipeline import eval_dataset
from app.training.all_reduce_self_test import run_all_reduce_self_test
from app.training.optimizers import ScaledSGD
from tests.conftest import CPUS
from tests.small_models import (
    build_network,
    create,
    deep_norm_network,
    momentum_sgd,
    network_with_dropout,
    new_strategy,
    small_network,
    small_resnet,
)
from tests.strategies.placement import devices_of_variables
from tests.strategies.walks import (
    NUM_STEPS,
    ROUNDING,
    Training,
    assert_close,
    assert_same_bits,
    batches,
    make_images,
    walk,
)
from tests.strategies.walks import training as t

pytestmark = pytest.mark.parity
BFLOAT16, FLOAT16 = 2.0**-8, 2.0**-11
NORM, SYNC = {"network": deep_norm_network}, {"network": deep_norm_network, "batch_norm": "sync"}


def scheduled(optimizer_class, **options):
    schedule = keras.optimizers.schedules.CosineDecay(0.1, 10)
    return optimizer_class(schedule, momentum=0.9, nesterov=True, weight_decay=0.01, **options)


keras_sgd = functools.partial(scheduled, keras.optimizers.SGD)
scaled_sgd = functools.partial(scheduled, ScaledSGD, initial_scale=2.0**15)
float16_sgd = functools.partial(ScaledSGD, 0.1, initial_scale=1024.0)
overflowing_sgd = functools.partial(scheduled, ScaledSGD, initial_scale=2.0**18)


def real_network(name):
    """Builds a model of the program, with scaled images."""
    images = keras.Input((28, 28, 1), dtype="uint8")
    return keras.Model(images, build_network(name)(keras.layers.Rescaling(1 / 255)(images)))


def lenet():
    return real_network("lenet")


def resnet18():
    return real_network("resnet18")


def frozen_network():
    model = deep_norm_network()
    model.get_layer("norm").trainable = False
    return model


NESTEROV = {"optimizer": keras_sgd}
BF16, F16 = {"policy": "mixed_bfloat16"}, {"policy": "mixed_float16", "optimizer": float16_sgd}
OVERFLOW = {"policy": "mixed_float16", "optimizer": overflowing_sgd}
THREE = {**NORM, "optimizer": momentum_sgd, "label_smoothing": 0.1}
IN_BF16 = {"communication_dtype": "bfloat16", "bucket_mib": 1}
DROP = {"micro_batches": 2, "pipeline_cuts": ("drop",)}
PARTS = {**NORM, "accumulate_steps": 2, "shard_weights": (2, 1)}
UNEVEN = {**SYNC, "shard_weights": (2, 1, 1)}


@pytest.fixture(scope="module", autouse=True)
def _released_walks():
    yield
    walk.cache_clear()


def slow(case):
    """Marks a cell of a table that has a close relative beside it, for `make test-all` only."""
    return pytest.param(*(case if isinstance(case, list) else [case]), marks=pytest.mark.slow)


def cases(table):
    """Returns a test case for each training of each row, beside the one that it equals."""
    for reference, *others in table:
        for other in others:
            is_slow = not isinstance(other, (list, Training))
            values = other.values if is_slow else other if isinstance(other, list) else [other]
            yield pytest.param(
                values[0], reference, *values[1:],
                id=f"{values[0]}={reference}", marks=other.marks if is_slow else (),
            )  # fmt: skip


# A training, and those that are bitwise identical to it.
SAME_BITS = [
    # One replica is one device.
    (t("single", 1), t("manual", 1), slow(t("tensor", 1)),
     slow(t("mirrored", 1)), slow(t("multi_worker", 1)), slow(t("sharded", 1))),
    # Residual blocks in stages.
    (t("single", 1, small_resnet), t("pipeline", 3, small_resnet, micro_batches=1)),
    # BatchNorm statistics are each replica's own, or each micro-batch's.
    (t("manual", 3, **THREE), t("mirrored", 3, **THREE), t("sharded", 3, **THREE),
     t("sharded", 3, **THREE, shard="optimizer"),
     t("pipeline", 3, **THREE, micro_batches=3, recompute=True),
     t("single", 1, **THREE, accumulate_steps=3)),
    (t("manual", 4, **NESTEROV), t("sharded", 4, **NESTEROV)),
    (t("manual", 2, lenet), slow(t("mirrored", 2, lenet))),
    (t("manual", 2, resnet18), slow(t("mirrored", 2, resnet18))),
    # Parts of other sizes, several shards for each replica.
    (t("manual", 2, **PARTS), t("mirrored", 2, **PARTS), t("sharded", 2, **PARTS)),
    # Each adds its own micro-batches first: (0 + 1) + (2 + 3), not ((0 + 1) + 2) + 3.
    (t("manual", 2, accumulate_steps=2),
     t("pipeline", 4, micro_batches=2, model_parallel=2, schedule="gpipe")),
    (t("manual", 3, **UNEVEN), t("sharded", 3, **UNEVEN)),
    # Activations and gradients of 16 bits travel.
    (t("manual", 2, **OVERFLOW), t("mirrored", 2, **OVERFLOW), t("sharded", 2, **OVERFLOW),
     t("pipeline", 2, **OVERFLOW, micro_batches=2, pipeline_cuts=("conv",))),
    # Were another mask drawn where activations are computed again, the gradients would be others.
    (t("pipeline", 2, network_with_dropout, **DROP),
     t("pipeline", 2, network_with_dropout, **DROP, recompute=True)),
]  # fmt: skip
# A training, and those that equal it within a tolerance.
CLOSE = [
    (t("single", 1), [t("manual", 3), ROUNDING], [t("multi_worker", 3), ROUNDING],
     [t("tensor", 4), 5e-6],  # Gradients are added over the devices.
     [t("manual", 2, accumulate_steps=2), 5e-6]),
    (t("single", 1, **NESTEROV), [t("manual", 4, **NESTEROV), 1e-5]),
    # BatchNorm over the whole batch; it carries the rounding of a sum further.
    (t("single", 1, **NORM), [t("manual", 3, **UNEVEN), 2e-5], [t("mirrored", 3, **SYNC), 2e-5],
     [t("multi_worker", 2, **SYNC), 2e-5]),
    (t("single", 1, frozen_network), [t("manual", 3, frozen_network, batch_norm="sync"), ROUNDING]),
    (t("manual", 2, **THREE), [t("tensor", 4, **THREE, model_parallel=2), 1e-4],
     slow([t("mirrored", 2, **THREE, jit_compile=True), 2e-5])),
    (t("manual", 2, accumulate_steps=2), [t("manual", 2, jit_compile=True), 5e-6]),
    (t("single", 1, small_resnet), [t("tensor", 3, small_resnet), 1e-4]),
    (t("manual", 3), [t("manual", 3, all_reduce="ring", bucket_mib=0.001), ROUNDING],
     [t("mirrored", 3, all_reduce="ring"), ROUNDING]),
]  # fmt: skip
# A training, and those that differ from it by more than rounding and less than a tolerance.
ROUGH = [
    (t("manual", 3), [t("manual", 3, **IN_BF16), BFLOAT16],
     [t("mirrored", 3, **IN_BF16), BFLOAT16]),
    (t("single", 1), [t("manual", 3, **BF16), 8 * BFLOAT16], [t("tensor", 2, **F16), 8 * FLOAT16]),
]  # fmt: skip


def without_seeds(state):
    """Keras numbers the random states of a process."""
    return {name: array for name, array in state.items() if "seed" not in name}


@pytest.mark.parametrize(("found", "expected"), cases(SAME_BITS))
def test_the_same_training_bit_for_bit(found, expected):
    own, other = walk(found), walk(expected)
    assert own.losses == pytest.approx(other.losses, rel=1e-12)
    for state, expected_state in zip(own.states, other.states, strict=True):
        assert_same_bits(without_seeds(state), without_seeds(expected_state))
    for shards, expected_shards in zip(own.statistics, other.statistics, strict=True):
        for a, b in zip(shards, expected_shards, strict=True):
            for array, expected_array in zip(a, b, strict=True):
                np.testing.assert_array_equal(array, expected_array)


@pytest.mark.parametrize(("found", "expected", "tolerance"), cases(CLOSE))
def test_the_same_training_within_rounding(found, expected, tolerance):
    own, other = walk(found), walk(expected)
    np.testing.assert_allclose(own.losses, other.losses, rtol=tolerance)
    for state, expected_state in zip(own.states, other.states, strict=True):
        assert_close(state, expected_state, tolerance)


@pytest.mark.parametrize(("found", "expected", "tolerance"), cases(ROUGH))
def test_sixteen_bits_round_as_they_do(found, expected, tolerance):
    expected_state = walk(expected).states[-1]
    state = {name: walk(found).states[-1][name] for name in expected_state}
    assert_close(state, expected_state, tolerance)
    with pytest.raises(AssertionError):
        assert_close(state, expected_state)
    assert {a.dtype for a in state.values()} == {np.dtype("float32"), np.dtype("int64")}


# A walk of each strategy; then other state that copies and shards hold.
EACH = [
    t("single", 1, **THREE, accumulate_steps=3),
    t("manual", 3, **THREE),
    t("mirrored", 3, **THREE),
    t("multi_worker", 2, **SYNC),
    t("sharded", 3, **THREE),
    t("pipeline", 3, **THREE, micro_batches=3, recompute=True),
    t("tensor", 4, **THREE, model_parallel=2),
]
WALKED = [
    *EACH,
    t("sharded", 3, **THREE, shard="optimizer"),
    t("pipeline", 4, micro_batches=2, model_parallel=2, schedule="gpipe"),
    t("mirrored", 2, **PARTS),
    t("sharded", 2, **OVERFLOW),
    t("pipeline", 2, network_with_dropout, **DROP),
]


@pytest.mark.parametrize("walked", WALKED, ids=str)
def test_copies_hold_the_same_bits_but_for_their_own_statistics(walked):
    strategy, _, states, statistics, copies = walk(walked)
    assert len(copies) == strategy.num_copies
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
            floats = [v for v in copy.values() if v.dtype == tf.float32]
            assert devices_of_variables(floats) == {device}


@pytest.mark.parametrize("walked", WALKED, ids=str)
def test_from_a_saved_state_on_several_steps_in_one_call_are_the_same_steps(walked):
    """Whatever a copy holds: after the last step each differs from the state that is loaded."""
    strategy, losses, states, statistics, copies = walk(walked)
    strategy.load_state(states[2])
    strategy.states.load_per_shard_statistics(statistics[2])
    assert_same_bits(strategy.state(), states[2])
    iterator = batches(strategy, start_step=2)
    totals = [strategy.train_steps(iterator, num_steps) for num_steps in (2, 0)]
    assert totals[0].loss_sum == pytest.approx(losses[2] * 6 + losses[3] * 17, rel=1e-6)
    assert (totals[0].examples, totals[1]) == (23, (0, 0, 0))
    assert_same_bits(strategy.state(), states[-1])
    for copy, expected in zip(strategy.states.per_copy(), copies, strict=True):
        assert_same_bits(copy, expected)
    assert strategy.steps.num_tracings == 1


@pytest.mark.parametrize("walked", EACH, ids=str)
def test_what_reads_a_strategy_sees_every_example_once_and_changes_nothing(walked):
    """Evaluation, prediction and the self-test of the all-reduce, which raises what it finds."""
    strategy, _, states, _, copies = walk(walked)
    images, labels = make_images(40)
    # The last of four batches has one example, so that some replicas get none.
    dataset = eval_dataset(images, labels, global_batch_size=13)
    totals, logits = strategy.evaluate(dataset), strategy.predict(images, global_batch_size=13)
    assert strategy.evaluate(dataset) == totals
    assert totals.examples == 40
    assert totals.correct == np.sum(np.argmax(logits, -1) == labels)
    losses = np.log(np.sum(np.exp(logits), axis=-1)) - logits[np.arange(40), labels]
    assert totals.loss_sum == pytest.approx(np.sum(losses), rel=1e-5)
    np.testing.assert_allclose(strategy.predict(images[38:]), logits[38:], rtol=1e-5, atol=1e-6)
    run_all_reduce_self_test(strategy)
    for copy, expected in zip(strategy.states.per_copy(), copies, strict=True):
        assert_same_bits(copy, expected)
    # What is read is what one device holds, to which the state is assigned.
    single = one_device(walked.network, walked.optimizer)
    single.load_state(states[-1])
    np.testing.assert_allclose(single.predict(images), logits, rtol=1e-4, atol=1e-5)


@functools.cache
def one_device(network, optimizer):
    return create("single", 1, network, optimizer)


def test_a_state_of_another_model_is_refused_by_name():
    strategy, _, states, statistics, _ = walk(t("manual", 3, **THREE))
    other = {**states[-1], "model/deep_norm/conv/kernel": np.zeros((2, 2, 1, 3), np.float32)}
    with pytest.raises(ValueError, match=r"conv/kernel: float32\[2, 2, 1, 3\] for float32\[5"):
        strategy.load_state(other)
    with pytest.raises(ValueError, match="nothing"):
        strategy.load_state(dict(list(states[-1].items())[:-1]))
    first = statistics[-1][0]
    with pytest.raises(ValueError, match="of 4 replicas instead of"):
        strategy.states.load_per_shard_statistics([*statistics[-1], first])
    with pytest.raises(ValueError, match="another model"):
        strategy.states.load_per_shard_statistics([*statistics[-1][:-1], first[:-1]])
    assert_same_bits(strategy.state(), states[-1])


def test_replicas_start_from_the_weights_of_the_first_whatever_builds_them():
    """Without a seed each model that is built has weights of its own."""
    for name in ("manual", "mirrored", "multi_worker", "sharded"):
        strategy = new_strategy(name, 3, shard="optimizer")
        strategy.build(small_network, lambda: keras.optimizers.SGD(0.1))
        first, *others = strategy.states.per_copy()
        assert len(others) == 2 and np.ptp(next(iter(first.values()))) > 0.1  # Of a kernel.
        for state in others:
            assert_same_bits(state, first)


@pytest.mark.parametrize(("name", "num_devices"), [("single", 1), ("manual", 2)])
def test_gradient_against_a_hand_computed_case(name, num_devices):
    """One feature x, two weights, two classes; worked out on paper.

    x = (1, 2, 4), y = (0, 1, 1), w = (0, 0): every probability is 1/2, so the gradient of the mean
    loss by w0 is sum(x (1/2 − [y = 0])) / 3 = (−1/2 + 1 + 2) / 3 = 5/6, by w1 −5/6. Shards of the
    three examples are uneven on two devices: a mean of means would give 9/8.
    """

    def build():
        features = keras.Input((1, 1, 1), dtype="uint8")
        flat = keras.layers.Flatten()(keras.layers.Rescaling(1.0)(features))
        return keras.Model(
            features, keras.layers.Dense(2, use_bias=False, kernel_initializer="zeros")(flat)
        )

    strategy = create(name, num_devices, build, lambda: keras.optimizers.SGD(1.0))
    features = np.array([1, 2, 4], np.uint8).reshape(3, 1, 1, 1)
    dataset = eval_dataset(features, np.array([0, 1, 1]), global_batch_size=3)
    totals = strategy.train_steps(strategy.distribute(dataset.repeat()), 1)
    weights = strategy.state()[f"model/{strategy.model.trainable_variables[0].path}"]
    np.testing.assert_allclose(weights, [[-5 / 6, 5 / 6]], rtol=1e-6)
    np.testing.assert_allclose(totals.loss, np.log(2), rtol=1e-6)
    assert totals.examples == 3


@pytest.mark.parametrize("name", ["manual", "tensor"])
def test_steps_that_overflow_are_skipped(name):
    """All others are `manual`, bit for bit."""
    states, skipped = walk(t(name, 2, **OVERFLOW)).states, []
    for before, after in itertools.pairwise(states):
        scales = [float(state["optimizer/loss_scale"]) for state in (before, after)]
        own = {"optimizer/loss_scale", "optimizer/finite_steps", "optimizer/iteration"}
        changed = any(not np.array_equal(after[k], before[k]) for k in {*after} - own)
        assert changed == (scales[0] == scales[1]) and scales[1] in (scales[0], scales[0] / 2)
        assert after["optimizer/iteration"] == before["optimizer/iteration"] + 1
        skipped.append(not changed)
    assert {*skipped} == {True, False}
    assert all(np.isfinite(array).all() for array in states[-1].values())
    assert states[-1]["optimizer/finite_steps"] == skipped[::-1].index(True)


def test_without_an_overflow_the_bits_are_those_without_a_scale():
    plain = walk(t("manual", 2, **NESTEROV)).states[-1]
    scaled = {**walk(t("sharded", 2, optimizer=scaled_sgd, shard="gradients")).states[-1]}
    own = {name: scaled.pop(name) for name in ("optimizer/loss_scale", "optimizer/finite_steps")}
    assert list(own.values()) == [2.0**15, NUM_STEPS]
    assert_same_bits(scaled, plain)


@pytest.mark.parametrize("network", [lenet, pytest.param(resnet18, marks=pytest.mark.slow)])
def test_real_networks_with_empty_shards(network):
    """Their fused kernels fail on an empty batch."""
    images, labels = make_images(4)
    strategy = create("manual", 3, network)
    logits = strategy.predict(images, global_batch_size=3)  # 1, 1, 1 and then 1, 0, 0.
    assert logits.shape == (4, 10) and np.all(np.isfinite(logits))
    np.testing.assert_allclose(strategy.predict(images[3:])[0], logits[3], rtol=1e-4, atol=1e-5)
    assert strategy.evaluate(eval_dataset(images, labels, global_batch_size=3)).examples == 4


def test_without_an_all_reduce_each_replica_keeps_its_own_gradients():
    options = {"all_reduce": "none", "bucket_mib": 1.0, "communication_dtype": "bfloat16"}
    mirrored, *_, copies = walk(t("mirrored", 2, **options))
    weight = f"model/{mirrored.model.trainable_variables[0].path}"
    assert not np.array_equal(copies[0][weight], copies[1][weight])
    for strategy in (mirrored, new_strategy("manual", 2, **options)):
        sent = [[tf.constant(1.001)], [tf.constant(2.0)]]
        assert [t.numpy() for (t,) in strategy.all_reduce(sent)] == [np.float32(1.001), 2.0]


def test_options_that_do_not_fit_the_devices_or_the_strategy_are_refused():
    for name, num_devices, options, told in [
        ("single", 2, {}, "one device"),
        ("manual", 2, {"shard_weights": (1, 1, 1)}, "must have a weight for each of 2 replicas"),
        ("pipeline", 4, {"model_parallel": 3}, "--model_parallel=3 must divide the 4 devices"),
        ("mirrored", 1, {"all_reduce": "magic"}, "strategy mirrored must be one of .*, got magic"),
        ("tensor", 1, {"all_reduce": "none"}, "strategy tensor must be one of .*, got none"),
    ]:
        with pytest.raises(ValueError, match=told):
            new_strategy(name, num_devices, **options)


def test_tensors_are_summed_on_their_replica_s_device(monkeypatch):
    """NCCL refuses tensors whose device is unknown; here there is no GPU to refuse them."""
    strategy, devices = create("mirrored", 2), []
    monkeypatch.setattr(
        strategy,
        "sum_over_replicas",
        lambda tensors: [devices.append(t.device) or t for t in tensors],
    )
    strategy.all_reduce([[tf.constant(1.0)], [tf.constant(2.0)]])
    assert [device.rpartition(":")[2] for device in sorted(devices)] == ["0", "1"]
