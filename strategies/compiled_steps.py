"""Compiles the loop over training steps, with and without an observer."""

import abc
from typing import Any

import numpy as np
import tensorflow as tf

from strategies.observer import Observer
from strategies.shard_step import ShardStep
from strategies.step_totals import StepTotals

BatchIterator = Any  # TensorFlow has several types for what `distribute` returns.


class CompiledSteps(ShardStep):
    """Runs the training step of a strategy in compiled loops."""

    @abc.abstractmethod
    def train_step(self, iterator: BatchIterator) -> StepTotals:
        """Trains on one global batch: one optimizer step of every copy (traced in a graph)."""

    @property
    def num_tracings(self) -> int:
        """Number of traces of the training loop; above 1, input shapes or types have changed."""
        return self._train_loop.experimental_get_tracing_count()

    def train_steps(self, iterator: BatchIterator, num_steps: int) -> StepTotals:
        """Runs `num_steps` optimizer steps in one compiled call and returns their totals.

        The first call compiles the loop. `num_steps=0` compiles it without training.
        """
        return self._over_workers(to_host(self._train_loop(iterator, tf.constant(num_steps))))

    def train_observed_steps(
        self, iterator: BatchIterator, num_steps: int, observer: Observer
    ) -> StepTotals:
        """Runs the same steps as `train_steps` with another observer.

        The steps are compiled as a separate function; the function of `train_steps` is unchanged.

        Args:
            iterator: the result of `distribute`.
            num_steps: number of steps; 0 compiles the loop without training.
            observer: the same object in every call.
        """
        usual, self.observer = self.observer, observer  # Tracing the loop calls the observer.
        try:
            return self._over_workers(
                to_host(self._observed_loop(iterator, tf.constant(num_steps)))
            )
        finally:
            self.observer = usual

    def _over_workers(self, totals: StepTotals) -> StepTotals:
        """Returns the totals over all workers, added in order of workers."""
        per_worker = self.workers.gather_arrays([np.asarray(value) for value in totals])
        return StepTotals.sum([StepTotals(*(a.item() for a in arrays)) for arrays in per_worker])

    @tf.function
    def _train_loop(self, iterator: BatchIterator, num_steps: tf.Tensor) -> StepTotals:
        # Only this loop needs AutoGraph. Converting every function that a step calls took more than
        # half of the tracing time and changes nothing.
        train_step = tf.autograph.experimental.do_not_convert(self.train_step)
        totals = StepTotals.zeros()
        for _ in tf.range(num_steps):
            totals = totals.plus(train_step(iterator))
        return totals

    @tf.function
    def _observed_loop(self, iterator: BatchIterator, num_steps: tf.Tensor) -> StepTotals:
        train_step = tf.autograph.experimental.do_not_convert(self.train_step)
        totals = StepTotals.zeros()
        for _ in tf.range(num_steps):
            totals = totals.plus(train_step(iterator))
        return totals


def to_host(totals: StepTotals) -> StepTotals:
    """Copies totals to the host, which waits here for the compiled call to finish."""
    return StepTotals(*(np.asarray(value).item() for value in totals))
