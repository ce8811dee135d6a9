"""Layers that synchronise, before units whose inputs are within rounding of 0."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from lockstep.data.trace import SEED, STATISTIC
from lockstep.numeric.arrays import EPS
from tests.verifier import shown
from tests.verifier.keras_copies import REPLICAS, Copy, times

FAR = 0.1  # From 0, of the inputs of a ReLU.


def together(faulty, **changes):
    """Returns the step of all replicas."""
    step = faulty.steps[0]
    parts = tuple(faulty.ask(step, r) for r in REPLICAS)
    whole = [np.concatenate(arrays) for arrays in zip(*(part.data for part in parts), strict=True)]
    return parts[0]._replace(data=whole, scales=(1.0, 1.0), parts=parts, **changes)


def with_gradients(faulty, wrong, right):
    """Adds the difference of two sums of gradients to what the replicas send."""
    for step in faulty.steps:
        for r in REPLICAS:
            sent = step["raw", r]
            step["raw", r] = {n: g + (wrong[n] - right[n]) / 3 for n, g in sent.items()}
        faulty.follow(step)


def of_one_weight(faulty):
    faulty.change("raw", times(1.001), (0,))


def local_statistics(faulty):
    faulty.compute()


def without_an_example(faulty):
    ask = together(faulty)
    right = faulty.oracle.compute(ask)
    masks = [np.zeros(())]
    starts = faulty.oracle.loss_gradients(ask.state, ask.data, right.y_pred, masks)
    without = [np.where(np.arange(len(start))[:, None] == 8, 0, start) for start in starts]
    sums = [faulty.oracle.compute(ask._replace(starts=each)).raw for each in (without, starts)]
    with_gradients(faulty, *sums)


def with_another_mask(faulty):
    """Some units whose inputs are far from 0 return no gradient."""
    inner, generator = keras.layers.ReLU.call, np.random.default_rng(0)

    def call(layer, x):
        y = inner(layer, x)
        lost = tf.constant(generator.random(x.shape) < 0.1) & (x > FAR)
        return tf.where(lost, tf.stop_gradient(y), y)

    right = faulty.oracle.compute(together(faulty)).raw
    keras.layers.ReLU.call = call
    try:
        wrong = faulty.oracle.compute(together(faulty)).raw
    finally:
        keras.layers.ReLU.call = inner
    with_gradients(faulty, wrong, right)


def of_other_kernels(faulty):
    """All replicas compute with kernels that round in another way."""
    result = faulty.oracle.compute(together(faulty, noise=(EPS, 0)))
    (step,) = faulty.steps
    left = faulty.of_kind(STATISTIC, SEED)
    for r in REPLICAS:
        step["y_pred", r] = [np.split(array, 3)[r] for array in result.y_pred]
        step["raw", r] = {n: (g / 3).astype(np.float32) for n, g in result.raw.items()}
        step["after", r] = step["after", r] | {n: result.of_parts[r][n] for n in left}
        loss = faulty.oracle.loss(
            step["before", r], step["data", r], step["y_pred", r], step["mask", r]
        )
        step["loss", r] = [np.float32(loss / 3), np.float32(0)]
    faulty.follow(step)


def test_units_that_turn_over_with_the_last_bits_are_right():
    faulty = Copy("pooled")
    right = faulty.oracle.compute(together(faulty)).raw
    of_other_kernels(faulty)
    sums = faulty.steps[0]["sums", 0]
    name = max(sums, key=lambda n: np.linalg.norm(sums[n] - right[n]))
    assert np.linalg.norm(sums[name] - right[name]) > 1e-3 * np.linalg.norm(right[name])
    assert not (verdict := faulty.verdict()).findings, str(verdict)


@pytest.mark.parametrize(
    ("make", "found"),
    [
        (of_one_weight, "gradients: "),
        (without_an_example, "gradients: unexplained"),
        (with_another_mask, "gradients: unexplained"),
        (local_statistics, "forward: local_statistics"),
    ],
)  # fmt: skip
def test_faults_are_found(make, found):
    faulty = Copy("pooled")
    of_other_kernels(faulty)
    make(faulty)
    verdict = faulty.verdict()
    assert found in shown(verdict), str(verdict)
