"""Evaluates a strategy's model and predicts with it."""

from collections.abc import Callable, Mapping, Sequence

import keras
import numpy as np
import tensorflow as tf

from strategies.compiled_steps import BatchIterator, over_workers, to_host
from strategies.replica import Replica
from strategies.step_totals import StepTotals
from strategies.workers import Workers

Statistics = dict[str, tf.Tensor]
LogitsAndTotals = tuple[tf.Tensor, StepTotals]  # The logits of a shard are `(n_r, num_classes)`.


class Evaluation:
    """Runs the forward pass of a strategy over datasets, and changes no state.

    Args:
        forward: `Strategy.forward`.
        distribute: `Strategy.distribute`.
        workers: the processes that train together.
    """

    def __init__(
        self,
        forward: Callable[[BatchIterator, Statistics], list[LogitsAndTotals]],
        distribute: Callable[[tf.data.Dataset], BatchIterator],
        workers: Workers,
    ):
        self._forward, self._distribute, self._workers = forward, distribute, workers

    def totals(
        self,
        dataset: tf.data.Dataset,
        averages: Mapping[str, np.ndarray],
        on_batch: Callable[[], None],
    ) -> StepTotals:
        """Returns the totals over a dataset; see `Strategy.evaluate`.

        Args:
            dataset: global batches; finite.
            averages: name → averaged moving statistics.
            on_batch: called after each batch.
        """
        iterator, statistics = self._distribute(dataset.repeat()), _by_path(averages)
        totals = StepTotals(0.0, 0, 0)
        for _ in range(int(dataset.cardinality())):
            totals = totals.plus(to_host(self._evaluate_batch(iterator, statistics)))
            on_batch()
        return over_workers(totals, self._workers)

    def logits(
        self, images: np.ndarray, averages: Mapping[str, np.ndarray], global_batch_size: int
    ) -> np.ndarray:
        """Returns the logits of images; see `Strategy.predict`."""
        labels = np.zeros(len(images), np.int32)
        dataset = tf.data.Dataset.from_tensor_slices((images, labels)).batch(global_batch_size)
        iterator, statistics = self._distribute(dataset.repeat()), _by_path(averages)
        logits = []
        for _ in range(int(dataset.cardinality())):
            own = self._predict_batch(iterator, statistics).numpy()
            for message in self._workers.gather(own.tobytes()):
                logits.append(np.frombuffer(message, own.dtype).reshape(-1, *own.shape[1:]))
        return np.concatenate(logits)

    @tf.function(autograph=False)
    def _evaluate_batch(self, iterator: BatchIterator, statistics: Statistics) -> StepTotals:
        shards = self._forward(iterator, statistics)
        return StepTotals.sum([StepTotals.zeros(), *(totals for _, totals in shards)])

    @tf.function(autograph=False)
    def _predict_batch(self, iterator: BatchIterator, statistics: Statistics) -> tf.Tensor:
        return tf.concat([logits for logits, _ in self._forward(iterator, statistics)], axis=0)


def _by_path(averages: Mapping[str, np.ndarray]) -> Statistics:
    with tf.device("CPU:0"):  # Each device copies the values that it needs from the host.
        return {name.removeprefix("model/"): tf.constant(a) for name, a in averages.items()}


def classify(
    replica: Replica, examples: Sequence[tf.Tensor], statistics: Mapping[str, tf.Tensor]
) -> LogitsAndTotals:
    """Computes the logits and totals of a replica's examples, which may be empty.

    Changes no state: the model's moving statistics are replaced only for this call.

    Args:
        replica: the replica whose weights are used, on the current device.
        examples: images and labels.
        statistics: path of a variable → tensor that replaces the replica's value.
    """
    images, labels = examples
    model = replica.model
    values = [(v, statistics[v.path]) for v in model.variables if v.path in statistics]
    if replica.gathered_weights:
        values += zip(model.trainable_variables, replica.gathered_weights, strict=True)

    def call(images: tf.Tensor) -> tf.Tensor:
        with keras.StatelessScope(state_mapping=values):
            return model(images, training=False)

    logits = call_without_empty_batch(call, images)
    return logits, StepTotals.of(logits, labels)


def call_without_empty_batch(
    call: Callable[[tf.Tensor], tf.Tensor], images: tf.Tensor
) -> tf.Tensor:
    """Returns the logits of a shard, which may be empty.

    oneDNN's fused convolutions fail on an empty batch, which is therefore padded with a blank
    image whose logits are removed.
    """
    num_images = tf.shape(images)[0]
    num_blanks = tf.cast(num_images == 0, tf.int32)
    padded = tf.pad(images, [[0, num_blanks], *[[0, 0]] * (len(images.shape) - 1)])
    return call(padded)[:num_images]
