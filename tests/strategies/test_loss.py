"""The loss: exact for the global batch, however it is split; the loss scale of float16."""

import keras
import numpy as np
import tensorflow as tf

from app.training.optimizers import ScaledSGD
from strategies.base import StepTotals
from strategies.loss import differentiate, shard_loss, share_overflow
from tests.conftest import CPUS


def test_label_smoothing_against_the_definition():
    generator = np.random.default_rng(0)
    logits = generator.normal(size=(5, 10)).astype(np.float32)
    labels = generator.integers(0, 10, 5)
    target = 0.9 * np.eye(10)[labels] + 0.1 / 10
    log_probabilities = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    arguments = tf.constant(logits), tf.constant(labels, tf.int32), 5
    loss, totals = shard_loss(*arguments, label_smoothing=0.1)
    np.testing.assert_allclose(loss, -(target * log_probabilities).sum() / 5, rtol=1e-6)
    plain, _ = shard_loss(*arguments)
    np.testing.assert_allclose(totals.loss_sum, 5 * plain, rtol=1e-6)


def test_a_scaled_backward_pass_keeps_small_gradients():
    weight = tf.Variable(1.0)

    def gradient(loss_scale):
        with tf.GradientTape() as tape:
            loss = tf.cast(
                tf.cast(weight, tf.float16) * tf.cast(1e-8 * 2**10, tf.float16), "float32"
            )
            loss /= 2**10
        return differentiate(tape, loss, [weight], loss_scale=loss_scale)[0].numpy()

    scale = tf.constant(2.0**10)
    assert gradient(None) != gradient(scale)
    np.testing.assert_allclose(gradient(scale), 1e-8, rtol=1e-2)


def test_totals_give_mean_and_fraction_and_an_empty_shard_adds_nothing():
    totals = StepTotals(3.0, 6, 8).plus(StepTotals(1.0, 0, 2))
    assert totals == (4.0, 6, 10)
    assert totals.loss == 0.4 and totals.accuracy == 0.6
    loss, totals = shard_loss(tf.zeros((0, 10)), tf.zeros((0,), tf.int32), 5)
    assert [float(v) for v in (loss, *totals)] == [0, 0, 0, 0]


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
