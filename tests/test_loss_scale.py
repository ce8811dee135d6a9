"""Tests the loss scale of float16: skipped steps, on every strategy, and its adaptation."""

import functools

import keras
import numpy as np
import pytest
import tensorflow as tf

from app.training.optimizers import FusedSGD, ScaledSGD
from conftest import CPUS
from small_models import create, deep_network
from strategies import STRATEGIES
from strategies.loss_scale import share_overflow
from test_strategies import assert_same_bits, walk

OPTIONS = {"momentum": 0.9, "nesterov": True, "weight_decay": 0.01}
OWN = {"optimizer/loss_scale", "optimizer/finite_steps"}


@pytest.fixture
def float16():
    keras.config.set_dtype_policy("mixed_float16")
    yield
    keras.config.set_dtype_policy("float32")


def train(images, name, optimizer_class, num_replicas=2, num_steps=3, **options):
    """Returns the state after each step, and those of all copies after the last."""
    optimizer_fn = functools.partial(optimizer_class, 0.1, **options)
    num_devices = 1 if name == "single" else num_replicas
    strategy = create(name, num_devices, deep_network, optimizer_fn)
    _, states = walk(strategy, images, global_batch_size=18, num_steps=num_steps)
    return states, strategy.copy_states()


@pytest.mark.parametrize("options", [{}, {"momentum": 0.9}, OPTIONS])
@pytest.mark.parametrize("name", ["single", "mirrored", "sharded"])
def test_without_an_overflow_the_bits_are_those_without_a_scale(images, name, options):
    scaled, _ = train(images, name, ScaledSGD, initial_scale=2.0**15, **options)
    plain, _ = train(images, name, FusedSGD, **options)
    assert_same_bits({k: v for k, v in scaled[-1].items() if k not in OWN}, plain[-1])


@pytest.mark.usefixtures("float16")
@pytest.mark.parametrize("name", STRATEGIES)
def test_every_device_skips_the_same_steps(images, name):
    """A scale of 2²⁵ overflows in the first steps; the copies stay equal."""
    states, copies = train(images, name, ScaledSGD, num_steps=8, initial_scale=2.0**25, **OPTIONS)
    scales = [float(state["optimizer/loss_scale"]) for state in states]
    assert scales[0] == 2.0**24 > scales[-1]
    finite = int(states[-1]["optimizer/finite_steps"])
    assert scales[-1] == 2.0 ** (25 - (8 - finite)) and 0 < finite < 8
    for step in range(1, 8):
        changed = [
            key
            for key, array in states[step].items()
            if key not in {*OWN, "optimizer/iteration"}
            and not np.array_equal(array, states[step - 1][key])
        ]
        assert bool(changed) == (scales[step] == scales[step - 1])
        assert int(states[step]["optimizer/iteration"]) == step + 1
    assert all(np.isfinite(array).all() for array in states[-1].values())
    for other in copies[1:]:
        assert_same_bits(copies[0], other)


@pytest.mark.usefixtures("float16")
@pytest.mark.parametrize("name", ["mirrored", "sharded"])
def test_strategies_that_add_in_the_same_order_skip_the_same_steps(images, name):
    options = {"num_steps": 8, "initial_scale": 2.0**25, **OPTIONS}
    expected, _ = train(images, "manual", ScaledSGD, **options)
    found, _ = train(images, name, ScaledSGD, **options)
    for first, second in zip(expected, found, strict=True):
        assert_same_bits(first, second)


def test_the_scale_grows_after_steps_without_an_overflow():
    optimizer = ScaledSGD(0.5, initial_scale=4.0, growth_steps=3)
    weight = keras.Variable([1.0, 2.0])
    optimizer.build([weight])
    scales = []
    for gradient in (0.0, 0.0, 1.0, np.nan, 0.0, np.inf, -np.inf, np.nan, 0.0):
        optimizer.apply([tf.constant([gradient, 0.0])], [weight])
        scales.append(float(optimizer.loss_scale.value))
    assert scales == [4, 4, 8, 4, 4, 2, 1, 1, 1]  # It is never below 1.
    assert weight.numpy().tolist() == [0.5, 2.0]
    assert int(optimizer.finite_steps.value) == 1


def test_an_overflow_is_made_known_to_every_device():
    right = [tf.constant([1.0, -0.0])], [tf.constant([2.0]), tf.zeros([0])]
    shared = share_overflow(right, CPUS[:2])
    for device, other in zip(right, shared, strict=True):
        assert [t.numpy().tobytes() for t in device] == [t.numpy().tobytes() for t in other]
    for bad in (np.inf, -np.inf, np.nan):
        for shared in share_overflow([right[0], [tf.constant([bad]), tf.zeros([0])]], CPUS[:2]):
            assert np.isnan(shared[0].numpy()).all()
