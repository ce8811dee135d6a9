"""The loss: exact for the global batch, however it is split; totals over examples."""

import numpy as np
import tensorflow as tf

from strategies.base import StepTotals, sum_of_losses


def test_label_smoothing_against_the_definition():
    generator = np.random.default_rng(0)
    logits = generator.normal(size=(5, 10)).astype(np.float32)
    labels = generator.integers(0, 10, 5)
    target = 0.9 * np.eye(10)[labels] + 0.1 / 10
    log_probabilities = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    loss = sum_of_losses(tf.constant(logits), tf.constant(labels, tf.int32), 0.1)
    np.testing.assert_allclose(loss, -(target * log_probabilities).sum(), rtol=1e-6)


def test_totals_give_mean_and_fraction_and_an_empty_shard_adds_nothing():
    totals = StepTotals.sum([StepTotals(3.0, 6, 8), StepTotals(1.0, 0, 2)])
    assert totals == (4.0, 6, 10)
    assert totals.loss == 0.4 and totals.accuracy == 0.6
    empty = tf.zeros((0, 10)), tf.zeros((0,), tf.int32)
    assert [float(v) for v in StepTotals.of(*empty)] == [0, 0, 0]
    assert sum_of_losses(*empty) == 0
    logits = tf.constant([[2.0, 0.0], [0.0, 2.0], [0.0, 2.0]])
    loss_sum, correct, examples = StepTotals.of(logits, tf.constant([0, 0, 1]))
    assert (int(correct), int(examples)) == (2, 3)
    np.testing.assert_allclose(loss_sum, 3 * np.log(1 + np.exp(-2)) + 2, rtol=1e-6)
