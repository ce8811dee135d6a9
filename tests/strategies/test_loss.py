"""The loss: exact for the global batch, however it is split; the loss scale of float16."""

import keras
import numpy as np
import tensorflow as tf

from app.training.optimizers import ScaledSGD
from strategies.base import StepTotals
from strategies.loss import differentiate, shard_loss, share_overflow
from tests.conftest import CPUS


def test_uneven_shards_add_up_to_the_mean_of_the_batch():
    generator = np.random.default_rng(0)
    logits = tf.constant(generator.normal(size=(10, 10)), tf.float32)
    labels = tf.constant(generator.integers(0, 10, 10), tf.int32)
    whole, totals = shard_loss(logits, labels, 10)
    parts = [shard_loss(logits[a:b], labels[a:b], 10) for a, b in [(0, 7), (7, 9), (9, 10)]]
    np.testing.assert_allclose(sum(float(loss) for loss, _ in parts), whole, rtol=1e-6)
    added = StepTotals.zeros()
    for _, part in parts:
        added = added.plus(part)
    assert (int(added.correct), int(added.examples)) == (int(totals.correct), 10)
    np.testing.assert_allclose(added.loss_sum, totals.loss_sum, rtol=1e-6)


def test_value_against_the_definition():
    # Two classes with logits 0 and log 3: the probabilities are 1/4 and 3/4.
    logits = tf.constant([[0.0, np.log(3.0)], [0.0, np.log(3.0)]])
    loss, totals = shard_loss(logits, tf.constant([1, 0]), 4)
    expected = -(np.log(3 / 4) + np.log(1 / 4))
    np.testing.assert_allclose(loss, expected / 4, rtol=1e-6)
    np.testing.assert_allclose(totals.loss_sum, expected, rtol=1e-6)
    assert int(totals.correct) == 1


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
