"""Compiles the loop over training steps."""

from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from strategies.step_totals import StepTotals
from strategies.workers import Workers

BatchIterator = Any  # TensorFlow has several types for what `distribute` returns.


class CompiledSteps:
    """Runs a training step several times in one compiled call.

    Args:
        train_step: trains on the next batch of an iterator; traced in a graph.
        workers: the processes that train together.
    """

    def __init__(self, train_step: Callable[[BatchIterator], StepTotals], workers: Workers):
        self._train_step, self._workers = train_step, workers

    @property
    def num_tracings(self) -> int:
        """Number of traces of the loop; above 1, input shapes or types have changed."""
        return self._loop.experimental_get_tracing_count()

    def run(self, iterator: BatchIterator, num_steps: int) -> StepTotals:
        """Runs the steps and returns their totals over all workers."""
        totals = self._loop(iterator, tf.constant(num_steps))
        return over_workers(to_host(totals), self._workers)

    # AutoGraph would convert every function that a step calls: half of the tracing time.
    @tf.function(autograph=False)
    def _loop(self, iterator: BatchIterator, num_steps: tf.Tensor) -> StepTotals:
        def is_left(step: tf.Tensor, totals: StepTotals) -> tf.Tensor:
            return step < num_steps

        def train(step: tf.Tensor, totals: StepTotals) -> tuple[tf.Tensor, StepTotals]:
            return step + 1, totals.plus(self._train_step(iterator))

        _, totals = tf.while_loop(is_left, train, (tf.constant(0), StepTotals.zeros()))
        return totals


def to_host(totals: StepTotals) -> StepTotals:
    """Copies totals to the host, which waits here for the compiled call to finish."""
    return StepTotals(*(np.asarray(value).item() for value in totals))


def over_workers(totals: StepTotals, workers: Workers) -> StepTotals:
    """Returns the totals over all workers, added in order of workers."""
    per_worker = workers.gather_arrays([np.asarray(value) for value in totals])
    return StepTotals.sum([StepTotals(*(a.item() for a in arrays)) for arrays in per_worker])
