"""The loss: exact for the global batch, however it is split; the loss scale of float16."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from app.training.optimizers import ScaledSGD
from strategies.base import StepTotals
from strategies.loss import share_overflow, sum_of_losses
from strategies.replica import Replica
from tests.conftest import CPUS
from tests.small_models import new_strategy


def test_label_smoothing_against_the_definition():
    generator = np.random.default_rng(0)
    logits = generator.normal(size=(5, 10)).astype(np.float32)
    labels = generator.integers(0, 10, 5)
    target = 0.9 * np.eye(10)[labels] + 0.1 / 10
    log_probabilities = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    loss = sum_of_losses(tf.constant(logits), tf.constant(labels, tf.int32), 0.1)
    np.testing.assert_allclose(loss, -(target * log_probabilities).sum(), rtol=1e-6)


@pytest.mark.parametrize("name", ["single", "manual"])
def test_a_scaled_backward_pass_keeps_small_gradients(name):
    strategy = new_strategy(name, 1, label_smoothing=0.1)
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(3, dtype="mixed_float16")])
    replica = Replica(0, "", model, keras.optimizers.SGD())

    def gradients(loss_scale, num_global_examples=2**24):  # One of them has a loss of 2⁻²⁴.
        images, labels = tf.ones((1, 2)), tf.constant([1])
        step = strategy.forward_and_backward(
            replica, images, labels, num_global_examples, loss_scale
        )
        return [gradient.numpy() for gradient in step[2]]

    right, scaled = gradients(None, 1), gradients(tf.constant(2.0**24))
    for own, other in zip(right, scaled, strict=True):
        np.testing.assert_allclose(own / 2**24, other, rtol=1e-2)
    assert np.abs(gradients(None)[0] - scaled[0]).max() > 1e-8  # Float16 rounds them.


def test_totals_give_mean_and_fraction_and_an_empty_shard_adds_nothing():
    totals = StepTotals(3.0, 6, 8).plus(StepTotals(1.0, 0, 2))
    assert totals == (4.0, 6, 10)
    assert totals.loss == 0.4 and totals.accuracy == 0.6
    empty = tf.zeros((0, 10)), tf.zeros((0,), tf.int32)
    assert [float(v) for v in StepTotals.of(*empty)] == [0, 0, 0]
    assert sum_of_losses(*empty) == 0
    logits = tf.constant([[2.0, 0.0], [0.0, 2.0], [0.0, 2.0]])
    loss_sum, correct, examples = StepTotals.of(logits, tf.constant([0, 0, 1]))
    assert (int(correct), int(examples)) == (2, 3)
    np.testing.assert_allclose(loss_sum, 3 * np.log(1 + np.exp(-2)) + 2, rtol=1e-6)


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
