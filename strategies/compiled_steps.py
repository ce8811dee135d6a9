"""The compiled loop over training steps, and a second one whose steps are observed."""

import abc
from typing import Any

import numpy as np
import tensorflow as tf

from strategies.observer import Observer
from strategies.shard_step import ShardStep
from strategies.step_totals import StepTotals

BatchIterator = Any  # TensorFlow has several types for what `distribute` returns.


class CompiledSteps(ShardStep):
    """Calls the training step of a strategy in compiled loops."""

    @abc.abstractmethod
    def train_step(self, iterator: BatchIterator) -> StepTotals:
        """Trains on one global batch: one optimizer step of every copy (traced, in a graph)."""

    @property
    def num_tracings(self) -> int:
        """How often the training loop has been traced: more than once means new shapes or types."""
        return self._train_loop.experimental_get_tracing_count()

    def train_steps(self, iterator: BatchIterator, num_steps: int) -> StepTotals:
        """Makes `num_steps` optimizer steps in one compiled call and returns their totals.

        The first call compiles the loop. `num_steps=0` compiles it and trains nothing.
        """
        return self._over_workers(to_host(self._train_loop(iterator, tf.constant(num_steps))))

    def train_observed_steps(
        self, iterator: BatchIterator, num_steps: int, observer: Observer
    ) -> StepTotals:
        """Makes the same steps as `train_steps`, with another observer.

        They are compiled as a function of their own: that of `train_steps` stays as it is.

        Args:
            iterator: what `distribute` returned.
            num_steps: how many; 0 compiles the loop and trains nothing.
            observer: the same one in every call.
        """
        usual, self.observer = self.observer, observer  # It is used while the loop is traced.
        try:
            return self._over_workers(
                to_host(self._observed_loop(iterator, tf.constant(num_steps)))
            )
        finally:
            self.observer = usual

    def _over_workers(self, totals: StepTotals) -> StepTotals:
        """Returns the totals of all workers, added in their order: each counts its own shards."""
        per_worker = self.workers.gather_arrays([np.asarray(value) for value in totals])
        return StepTotals.sum([StepTotals(*(a.item() for a in arrays)) for arrays in per_worker])

    @tf.function
    def _train_loop(self, iterator: BatchIterator, num_steps: tf.Tensor) -> StepTotals:
        # AutoGraph is for the loop alone: it would rewrite the source of every function that a step
        # calls, which took more than half of the time of tracing and changes nothing.
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
    """Reads totals from the device: the one point where the host waits for a compiled call."""
    return StepTotals(*(np.asarray(value).item() for value in totals))
