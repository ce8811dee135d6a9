"""Parity, the central test: all strategies are the same training, step by step.

`mirrored` must hold the same *bits* as `manual`; both stay within rounding of `single`, whose sums
run over the whole batch at once. Each comparison is over every weight after every step.
"""

import keras
import numpy as np
import pytest
import tensorflow as tf

from app.data.input_pipeline import eval_dataset, train_dataset
from app.training.optimizers import FusedSGD
from conftest import CPUS
from models import MODELS
from small_models import (
    build_network,
    create,
    deep_network,
    deep_norm_network,
    small_network,
    small_resnet,
)
from strategies import ALL_REDUCE_ALGORITHMS, STRATEGIES, load_strategy_class

# Float32 sums of a few dozen terms in another order differ in the last bits; a few steps with
# learning rate 0.1 do not carry that further than this.
ROUNDING = 2e-6
NUM_STEPS = 4
PARALLEL = [name for name in STRATEGIES if name != "single"]
# These split the data, and train one shard on each device; `test_pipeline.py` and `test_tensor.py`
# have the others' own parity.
DATA_PARALLEL = [name for name in PARALLEL if name not in ("pipeline", "tensor")]
# These have a whole copy of the weights on each device.
REPLICATED = [name for name in DATA_PARALLEL if name != "sharded"]
# A ring adds each part of a gradient in an order of its own, which shows from three replicas on.
SAME_ORDER = ("manual", "mirrored", "sharded")


def walk(strategy, images, *, global_batch_size, num_steps=NUM_STEPS):
    """Trains step by step; returns the loss and the state after each step."""
    pixels, labels = images
    iterator = strategy.distribute(
        train_dataset(pixels, labels, seed=3, global_batch_size=global_batch_size)
    )
    losses, states = [], []
    for _ in range(num_steps):
        losses.append(strategy.train_steps(iterator, 1).loss)
        states.append(strategy.state())
    return losses, states


def assert_same_bits(first, second):
    assert list(first) == list(second)
    for name in first:
        np.testing.assert_array_equal(first[name], second[name], err_msg=name, strict=True)


def assert_close(first, second, tolerance=ROUNDING):
    for name in first:
        np.testing.assert_allclose(
            first[name], second[name], rtol=tolerance, atol=tolerance, err_msg=name
        )


# 40 examples: 20 divides for 1, 2 and 4 replicas; 15 and 17 leave uneven shards and short last
# batches of 10 and 6.
@pytest.mark.parametrize(
    ("num_replicas", "global_batch_size"),
    [
        pytest.param(
            r, n, marks=[pytest.mark.slow] if (r, n) in ((1, 15), (4, 20), (4, 17)) else []
        )
        for r in (1, 2, 3, 4)
        for n in (20, 15, 17)
    ],
)
def test_parity_step_by_step(images, num_replicas, global_batch_size):
    single_losses, single_states = walk(
        create("single", 1), images, global_batch_size=global_batch_size
    )
    walks = {
        name: walk(create(name, num_replicas), images, global_batch_size=global_batch_size)
        for name in DATA_PARALLEL
    }
    manual_losses, manual_states = walks["manual"]
    for name, (losses, states) in walks.items():
        np.testing.assert_allclose(losses, single_losses, rtol=ROUNDING)
        for step in range(NUM_STEPS):
            assert_close(states[step], single_states[step])
            if name in SAME_ORDER or num_replicas <= 2:
                assert_same_bits(states[step], manual_states[step])
            else:
                assert_close(states[step], manual_states[step])
        same = name in SAME_ORDER or num_replicas <= 2
        assert losses == pytest.approx(manual_losses, rel=1e-12 if same else 1e-6)


@pytest.mark.parametrize("num_replicas", [1, 2, 3])
def test_batch_norm_parity(images, num_replicas):
    """Statistics are each replica's own, so all strategies agree, and one replica is `single`."""
    walks = {
        name: walk(create(name, num_replicas, deep_norm_network), images, global_batch_size=15)
        for name in SAME_ORDER
    }
    for step in range(NUM_STEPS):
        for name in SAME_ORDER[1:]:
            assert_same_bits(walks["manual"][1][step], walks[name][1][step])
    _, single_states = walk(create("single", 1, deep_norm_network), images, global_batch_size=15)
    if num_replicas == 1:
        assert_same_bits(walks["manual"][1][-1], single_states[-1])
    else:
        kernel = "model/deep_norm/conv/kernel"
        assert not np.array_equal(walks["manual"][1][-1][kernel], single_states[-1][kernel])


def test_momentum_schedule_and_decay_are_the_same_training(images):
    def optimizer_fn():
        schedule = keras.optimizers.schedules.CosineDecay(0.1, 10)
        return keras.optimizers.SGD(schedule, momentum=0.9, nesterov=True, weight_decay=0.01)

    _, single_states = walk(
        create("single", 1, optimizer_fn=optimizer_fn), images, global_batch_size=15
    )
    manual, *others = (
        walk(create(name, 2, optimizer_fn=optimizer_fn), images, global_batch_size=15)[1][-1]
        for name in DATA_PARALLEL
    )
    assert_close(manual, single_states[-1], tolerance=1e-5)
    for other in others:
        assert_same_bits(manual, other)
    assert manual["optimizer/iteration"] == NUM_STEPS


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize(("name", "num_replicas"), [("single", 1), ("manual", 2), ("mirrored", 2)])
def test_the_fused_momentum_step_gives_the_bits_of_keras(images, name, num_replicas, nesterov):
    def last_state(optimizer_class):
        options = {"momentum": 0.9, "nesterov": nesterov, "weight_decay": 0.01}
        optimizer_fn = lambda: optimizer_class(0.1, **options)  # noqa: E731
        strategy = create(name, num_replicas, optimizer_fn=optimizer_fn)
        return walk(strategy, images, global_batch_size=15)[1][-1]

    assert_same_bits(last_state(FusedSGD), last_state(keras.optimizers.SGD))


@pytest.mark.parametrize("name", STRATEGIES)
def test_gradient_against_a_hand_computed_case(name):
    """One feature x, two weights, two classes; worked out on paper.

    x = (1, 2, 4), y = (0, 1, 1), w = (0, 0): every probability is 1/2, so the gradient of the mean
    loss by w0 is sum(x (1/2 − [y = 0])) / 3 = (−1/2 + 1 + 2) / 3 = 5/6, by w1 −5/6. Shards of the
    three examples are uneven on two devices: a mean of means would give 9/8.
    """

    def build():
        features = keras.Input((1, 1, 1), dtype="uint8")
        cast = keras.layers.Rescaling(1.0)(features)
        logits = keras.layers.Dense(2, use_bias=False, kernel_initializer="zeros")(
            keras.layers.Flatten()(cast)
        )
        return keras.Model(features, logits)

    # One layer has no place for a cut: a pipeline of one stage, with uneven micro-batches.
    options = {"micro_batches": 2} if name == "pipeline" else {}
    devices = CPUS[: 1 if name in ("single", "pipeline") else 2]
    strategy = load_strategy_class(name)(devices, **options)
    strategy.build(build, lambda: keras.optimizers.SGD(1.0))
    features = np.array([1, 2, 4], np.uint8).reshape(3, 1, 1, 1)
    dataset = eval_dataset(features, np.array([0, 1, 1]), global_batch_size=3)
    totals = strategy.train_steps(strategy.distribute(dataset.repeat()), 1)
    weights = strategy.state()[f"model/{strategy.model.trainable_variables[0].path}"]
    np.testing.assert_allclose(weights, [[-5 / 6, 5 / 6]], rtol=1e-6)
    np.testing.assert_allclose(totals.loss, np.log(2), rtol=1e-6)
    assert totals.examples == 3


@pytest.mark.parametrize("name", STRATEGIES)
def test_steps_in_one_call_are_the_same_steps(images, name):
    num_replicas = 1 if name == "single" else 2
    results = []
    for calls in ([4], [1, 3], [0, 2, 0, 2]):
        strategy = create(name, num_replicas)
        iterator = strategy.distribute(train_dataset(*images, seed=3, global_batch_size=15))
        totals = [strategy.train_steps(iterator, num_steps) for num_steps in calls]
        results.append((sum(t.loss_sum for t in totals), strategy.state()))
    for loss_sum, state in results[1:]:
        assert loss_sum == results[0][0]
        assert_same_bits(state, results[0][1])


@pytest.mark.parametrize("name", PARALLEL)
def test_replicas_start_from_the_weights_of_the_first_whatever_builds_them(name):
    """Without a seed each model that is built has weights of its own."""
    strategy = load_strategy_class(name)(CPUS[:3])
    strategy.build(small_network, lambda: keras.optimizers.SGD(0.1))
    first, *others = strategy.copy_states()
    assert np.ptp(next(iter(first.values()))) > 0.1  # Of a kernel.
    for state in others:
        assert_same_bits(state, first)


@pytest.mark.parametrize("num_replicas", [2, 3])
@pytest.mark.parametrize("name", REPLICATED)
def test_replicas_hold_the_same_bits(images, name, num_replicas):
    strategy = create(name, num_replicas, small_resnet)
    iterator = strategy.distribute(train_dataset(*images, seed=3, global_batch_size=15))
    strategy.train_steps(iterator, 3)
    before = strategy.copy_states()
    assert len(before) == num_replicas
    trainable = {f"model/{variable.path}" for variable in strategy.model.trainable_variables}
    moving = [key for key in before[0] if key.endswith(("moving_mean", "moving_variance"))]
    for state in before[1:]:
        assert_same_bits({k: state[k] for k in trainable}, {k: before[0][k] for k in trainable})
        # Each replica has moved its own statistics.
        assert any(not np.array_equal(state[key], before[0][key]) for key in moving)
    saved = strategy.state()
    for key in moving:
        np.testing.assert_allclose(
            saved[key], np.mean([state[key] for state in before], axis=0), rtol=1e-6
        )
    for state, again in zip(before, strategy.copy_states(), strict=True):
        assert_same_bits(again, state)  # Reading the average has changed nothing.


@pytest.mark.parametrize("num_replicas", [1, 2, 3, 4])
@pytest.mark.parametrize("name", STRATEGIES)
def test_evaluation_sees_every_example_once(images, name, num_replicas):
    if name == "single" and num_replicas > 1:
        pytest.skip("single has one replica")
    strategy = create(name, num_replicas, deep_network)
    logits = strategy.predict(images[0])
    # 40 in batches of 13: the last has one example, so that some replicas get none.
    dataset = eval_dataset(*images, global_batch_size=13)
    totals = strategy.evaluate(dataset)
    assert totals.examples == 40
    assert totals.correct == np.sum(np.argmax(logits, -1) == images[1])
    log_sums = np.log(np.sum(np.exp(logits), axis=-1))
    expected = np.sum(log_sums - logits[np.arange(40), images[1]])
    assert totals.loss_sum == pytest.approx(expected, rel=1e-5)
    assert strategy.evaluate(dataset) == totals


@pytest.mark.parametrize("num_images", [1, 3, 40])
@pytest.mark.parametrize("name", PARALLEL)
def test_prediction_keeps_the_order(images, name, num_images):
    pixels = images[0][:num_images]
    expected = create("single", 1, deep_network).predict(pixels)
    predicted = create(name, 4, deep_network).predict(pixels, global_batch_size=16)
    assert predicted.shape == (num_images, 10)
    np.testing.assert_allclose(predicted, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("name", "model"),
    [
        pytest.param(n, m, marks=[pytest.mark.slow] if (n, m) != ("manual", "resnet18") else [])
        if m.startswith("resnet")
        else (n, m)
        for n in PARALLEL
        for m in MODELS
    ],
)
def test_fewer_images_than_replicas(images, name, model):
    """Empty shards, with the fused kernels of the real models."""

    def build():
        inputs = keras.Input((28, 28, 1), dtype="uint8")
        return keras.Model(inputs, build_network(model)(keras.layers.Rescaling(1 / 255)(inputs)))

    # A small network may have a single place to be cut.
    strategy = create(name, 2 if name == "pipeline" else 3, build)
    logits = strategy.predict(images[0][:4], global_batch_size=3)  # 1, 1, 1 and then 1, 0, 0.
    alone = strategy.predict(images[0][3:4])
    assert logits.shape == (4, 10) and np.all(np.isfinite(logits))
    np.testing.assert_allclose(alone[0], logits[3], rtol=1e-4, atol=1e-5)
    dataset = eval_dataset(images[0][:4], images[1][:4], global_batch_size=3)
    assert strategy.evaluate(dataset).examples == 4


@pytest.mark.parametrize(
    ("writer", "reader"),
    [
        # One state is like another: each strategy writes one that manual reads, and reads manual's.
        pytest.param(w, r, marks=[] if "manual" in (w, r) else [pytest.mark.slow])
        for w in STRATEGIES
        for r in STRATEGIES
    ],
)
def test_any_strategy_goes_on_from_the_state_of_any_other(images, writer, reader):
    first = create(writer, 1 if writer == "single" else 2)
    _, states = walk(first, images, global_batch_size=20, num_steps=2)
    second = create(reader, 1 if reader == "single" else 3)
    second.load_state(states[1])
    assert_same_bits(second.state(), states[1])
    dataset = train_dataset(*images, seed=3, global_batch_size=20, start_step=2)
    for strategy in (first, second):
        strategy.train_steps(strategy.distribute(dataset), 2)
    assert_close(second.state(), first.state())


@pytest.mark.parametrize("name", STRATEGIES)
def test_a_state_of_another_model_is_refused_by_name(name):
    strategy = create(name, 1)
    before = strategy.state()
    other = {**before, "model/small/conv/kernel": np.zeros((2, 2, 1, 3), np.float32)}
    with pytest.raises(ValueError, match=r"conv/kernel: float32\[2, 2, 1, 3\] for float32\[5"):
        strategy.load_state(other)
    with pytest.raises(ValueError, match="nothing"):
        strategy.load_state(dict(list(before.items())[:-1]))
    assert_same_bits(strategy.state(), before)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("name", STRATEGIES)
def test_every_strategy_builds_every_model(name, model):
    def build():
        images = keras.Input((28, 28, 1), dtype="uint8")
        return keras.Model(images, build_network(model)(keras.layers.Rescaling(1 / 255)(images)))

    num_devices = 1 if name == "single" else 2
    strategy = create(name, num_devices, build)
    num_shards = {"pipeline": 4, "tensor": 1}.get(name, num_devices)
    num_copies = 1 if name in ("sharded", "pipeline", "tensor") else num_devices
    assert (strategy.num_shards, strategy.num_copies) == (num_shards, num_copies)
    copies = [list(copy.values()) for copy in strategy.copies()]
    assert len(copies) == num_copies
    shapes = [v.shape for v in build().variables]
    for variables in copies:
        assert len(variables) == len(strategy.variable_names)
        assert [v.shape for v in variables[: len(shapes)]] == shapes
    if num_copies == num_devices:
        for variables, device in zip(copies, strategy.devices, strict=True):
            assert {v.device for v in variables if v.dtype == tf.float32} == {
                tf.DeviceSpec.from_string("/job:localhost/replica:0/task:0" + device).to_string()
            }
    for a, b in zip(copies[0], copies[-1], strict=True):
        np.testing.assert_array_equal(a.numpy(), b.numpy())


@pytest.mark.parametrize("name", STRATEGIES)
def test_an_unknown_all_reduce_is_refused_at_once(name):
    with pytest.raises(
        ValueError, match=f"--all_reduce of strategy {name} must be one of auto.*, got magic"
    ):
        load_strategy_class(name)(CPUS[:1], all_reduce="magic")


def test_single_refuses_more_than_one_device():
    with pytest.raises(ValueError, match="one device"):
        load_strategy_class("single")(CPUS[:2])


@pytest.mark.parametrize("name", STRATEGIES)
def test_reading_changes_nothing(images, name):
    strategy = create(name, 1 if name == "single" else 2, deep_norm_network)
    iterator = strategy.distribute(train_dataset(*images, seed=3, global_batch_size=15))
    strategy.train_steps(iterator, 2)
    before = strategy.copy_states()
    dataset = eval_dataset(*images, global_batch_size=13)
    totals, logits, state = (
        strategy.evaluate(dataset),
        strategy.predict(images[0]),
        strategy.state(),
    )
    strategy.per_shard_statistics()
    for old, new in zip(before, strategy.copy_states(), strict=True):
        assert_same_bits(new, old)
    # What was read is what another strategy, to which the state is assigned, holds.
    single = create("single", 1, deep_norm_network)
    single.load_state(state)
    assert single.evaluate(dataset).correct == totals.correct
    np.testing.assert_allclose(single.predict(images[0]), logits, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["mirrored", "multi_worker"])
def test_tensors_are_summed_on_their_replica_s_device(monkeypatch, name):
    """NCCL refuses tensors whose device is unknown; here there is no GPU to refuse them."""
    strategy, devices = create(name, 2), []
    monkeypatch.setattr(
        strategy,
        "_sum_over_replicas",
        lambda tensors: [devices.append(t.device) or t for t in tensors],
    )
    strategy.all_reduce([[tf.constant(1.0)], [tf.constant(2.0)]])
    assert [device.rpartition("/")[2] for device in sorted(devices)] == [
        "device:CPU:0",
        "device:CPU:1",
    ]


def test_mirrored_sums_gradients_without_a_gradient_of_the_sums(images):
    """That of `ReplicaContext.all_reduce` ties all sums together and is slow to trace."""
    strategy = create("mirrored", 3)
    iterator = strategy.distribute(train_dataset(*images, seed=3, global_batch_size=12))
    loop = strategy._train_loop.get_concrete_function(iterator, tf.constant(0))
    functions = loop.graph.as_graph_def().library.function
    operations = {node.op for function in functions for node in function.node_def}
    assert "Conv2DBackpropFilter" in operations and "IdentityN" not in operations


@pytest.mark.parametrize("name", STRATEGIES)
def test_a_step_without_all_reduce_keeps_each_replica_s_own_gradients(images, name):
    if name not in ALL_REDUCE_ALGORITHMS:
        with pytest.raises(ValueError, match="got none"):
            load_strategy_class(name)(CPUS[:1], all_reduce="none")
        return
    strategy = create(name, 2, all_reduce="none", bucket_mib=1.0, communication_dtype="bfloat16")
    strategy.train_steps(
        strategy.distribute(train_dataset(*images, seed=3, global_batch_size=15)), 1
    )
    first, second = strategy.copy_states()
    weight = f"model/{strategy.model.trainable_variables[0].path}"
    assert not np.array_equal(first[weight], second[weight])
    sent = [[tf.constant(1.001)], [tf.constant(2.0)]]
    assert [t.numpy() for (t,) in strategy.all_reduce(sent)] == [np.float32(1.001), 2.0]


def test_statistics_of_another_number_of_shards_are_refused(images):
    strategy = create("manual", 2, small_resnet)
    strategy.train_steps(
        strategy.distribute(train_dataset(*images, seed=3, global_batch_size=15)), 1
    )
    own = strategy.per_shard_statistics()
    with pytest.raises(ValueError, match="of 3 replicas instead of 2"):
        strategy.load_per_shard_statistics([*own, own[0]])
    with pytest.raises(ValueError, match="another model"):
        strategy.load_per_shard_statistics([own[0], own[1][:-1]])
