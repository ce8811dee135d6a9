"""Trainings of small networks, each made once, and what is read of them.

One training answers every question about a strategy: parity, evaluation, reading, resuming.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import keras
import numpy as np

from app.data.batches import train_dataset
from tests.small_models import create, deep_network

NUM_STEPS = 4
# Batches of 17, 17, 6, 17: over three replicas 6 + 6 + 5; the short one over four 2 + 2 + 1 + 1.
# The program refuses a batch with fewer examples than replicas.
NUM_EXAMPLES, GLOBAL_BATCH_SIZE = 40, 17
# Float32 sums of a few dozen terms in another order differ in the last bits; a few steps with
# learning rate 0.1 do not carry that further than this.
ROUNDING = 2e-6


class Training(NamedTuple):
    strategy: str
    num_devices: int
    network: Callable = deep_network
    optimizer: Callable | None = None
    policy: str = "float32"
    label_smoothing: float = 0.0
    all_reduce: str = "auto"
    batch_norm: str = "average"

    def __str__(self):
        shown = [getattr(value, "__name__", value) for value in self]
        return "-".join(str(value) for value in shown if value)


class Walk(NamedTuple):
    """A training step by step: what is read before it, and after each step."""

    strategy: object  # After the last step; a test that changes it trains it up to there again.
    losses: list
    states: list
    statistics: list  # Of each shard, after each step.
    copies: list  # After the last step.


def make_images(num_examples):
    """Returns random images with labels of all ten classes."""
    generator = np.random.default_rng(0)
    pixels = generator.integers(0, 256, (num_examples, 28, 28, 1), dtype=np.uint8)
    return pixels, (np.arange(num_examples) % 10).astype(np.uint8)


def batches(strategy, start_step=0):
    """Returns an iterator over the examples of a walk, from a step on."""
    options = {"seed": 3, "global_batch_size": GLOBAL_BATCH_SIZE, "start_step": start_step}
    return strategy.distribute(train_dataset(*make_images(NUM_EXAMPLES), **options))


@functools.cache
def walk(wanted):
    """Trains, or returns the training that has been made."""
    keras.config.set_dtype_policy(wanted.policy)
    try:
        strategy = create(
            *wanted[:4], label_smoothing=wanted.label_smoothing, all_reduce=wanted.all_reduce,
            batch_norm=wanted.batch_norm,
        )  # fmt: skip
        iterator, losses = batches(strategy), []
        states, statistics = [strategy.state()], [[]]
        for _ in range(NUM_STEPS):
            losses.append(strategy.train_steps(iterator, 1).loss)
            states.append(strategy.state())
            statistics.append(strategy.states.per_shard_statistics())
    finally:
        keras.config.set_dtype_policy("float32")
    return Walk(strategy, losses, states, statistics, strategy.states.per_copy())


def assert_same_bits(first, second):
    assert list(first) == list(second)
    for name in first:
        np.testing.assert_array_equal(first[name], second[name], err_msg=name, strict=True)


def assert_close(first, second, tolerance=ROUNDING):
    for name in first:
        np.testing.assert_allclose(
            first[name], second[name], rtol=tolerance, atol=tolerance, err_msg=name
        )
