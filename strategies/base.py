"""The contract between the training loop and a strategy.

The loop in `app/training/loop.py` uses nothing else. A subclass defines where the copies of the
weights are, what travels between devices, and in which order gradients are added. Everything else
is the same code for all strategies, here and in `copies.py`, so that a difference in results can
only come from a subclass.
"""

import abc
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from strategies import ALL_REDUCE_ALGORITHMS
from strategies.collectives import PerReplicaTensors
from strategies.copies import Copies
from strategies.gradient_buckets import GradientBuckets
from strategies.loss import differentiate, shard_loss
from strategies.observer import Observer, Shard
from strategies.prediction import predict_shard
from strategies.step_totals import StepTotals
from strategies.workers import Workers

ModelFn = Callable[[], keras.Model]
OptimizerFn = Callable[[], keras.optimizers.Optimizer]
BatchIterator = Any  # TensorFlow has several types for what `distribute` returns.
Statistics = dict[str, tf.Tensor]
LogitsAndTotals = tuple[tf.Tensor, StepTotals]  # Of a shard; logits `(n_r, num_classes)`.


class Replica(NamedTuple):
    """A copy of the weights, trained on one shard of each global batch.

    Attributes:
        replica_id: in 0 to R - 1, an int or an int scalar tensor.
        device: its name; "" where `tf.distribute` places it.
        model: on this device.
        optimizer: on this device.
    """

    replica_id: int | tf.Tensor
    device: str
    model: keras.Model
    optimizer: keras.optimizers.Optimizer


class Strategy(Copies):
    """One way to train a model on a list of devices.

    Data sets are `tf.data` sets of global batches `(images, labels)`: uint8
    `(n, height, width, channels)` and int32 `(n,)`, where n may differ from batch to batch.

    There is one shard and one copy of the weights for each device, as in data parallelism, unless a
    subclass sets other numbers.

    Args:
        devices: names of the devices of all workers, for example `["/device:CPU:0"]`.
        workers: the processes that train together, with equal numbers of devices; None for this one
            alone.
        all_reduce: the algorithm that sums the gradients over the shards: one of
            `all_reduce_algorithms`, "auto", or "none" to leave it out, which measures its cost.
        bucket_mib: size of the buckets in which gradients are summed, in 2²⁰ bytes; 0 for each
            gradient on its own, None for the default of the strategy.
        communication_dtype: dtype of the all-reduce, None for that of the gradients.
        jit_compile: compile loss and gradients of a shard with XLA.
        label_smoothing: see `strategies.loss.shard_loss`.
        loss_scale: see `strategies.loss.differentiate`.

    Raises:
        ValueError: this strategy cannot run on these devices or has no such algorithm.
    """

    name: str

    def __init__(
        self,
        devices: Sequence[str],
        *,
        workers: Workers | None = None,
        all_reduce: str = "auto",
        bucket_mib: float | None = None,
        communication_dtype: str | None = None,
        jit_compile: bool = False,
        label_smoothing: float = 0.0,
        loss_scale: float = 1.0,
    ):
        self.devices, self.workers = list(devices), workers or Workers()
        self.num_devices = self.num_shards = self.num_copies = len(self.devices)
        self.jit_compile = jit_compile
        self.observer = Observer()
        self.algorithm = self.default_all_reduce() if all_reduce == "auto" else all_reduce
        self._label_smoothing, self._loss_scale = label_smoothing, loss_scale
        bucket_mib = self.default_bucket_mib() if bucket_mib is None else bucket_mib
        self._bucket_bytes = round(bucket_mib * 2**20)
        self._communication_dtype = communication_dtype
        choices = "auto", *self.all_reduce_algorithms
        can_leave_out = bool(self.all_reduce_algorithms) and all_reduce == "none"
        if all_reduce not in choices and not can_leave_out:
            raise ValueError(
                f"--all_reduce of strategy {self.name} must be one of {', '.join(choices)}, got"
                f" {all_reduce}"
            )

    @property
    def all_reduce_algorithms(self) -> tuple[str, ...]:
        """Names of the algorithms to choose from, of `strategies.ALL_REDUCE_ALGORITHMS`."""
        return ALL_REDUCE_ALGORITHMS.get(self.name, ())

    def default_all_reduce(self) -> str:
        """Returns the algorithm that "auto" stands for on these devices."""
        return "reduce_to_one"

    def default_bucket_mib(self) -> float:
        """Returns the best size of buckets, 0 for each gradient on its own."""
        return 0.0

    @property
    def local_devices(self) -> list[str]:
        """The devices of this worker."""
        ids = self._local(self.num_devices)
        return self.devices[ids.start : ids.stop]

    @abc.abstractmethod
    def build(self, model_fn: ModelFn, optimizer_fn: OptimizerFn) -> None:
        """Builds every copy of the model and its optimizer, all with the same weights."""

    @abc.abstractmethod
    def train_step(self, iterator: BatchIterator) -> StepTotals:
        """Trains on one global batch: one optimizer step of every copy (traced, in a graph)."""

    @abc.abstractmethod
    def forward(self, iterator: BatchIterator, statistics: Statistics) -> list[LogitsAndTotals]:
        """Classifies one global batch with `classify`, and trains nothing (traced, in a graph).

        Args:
            iterator: over global batches.
            statistics: path of a variable → tensor to take in place of the copy's own.

        Returns:
            For each shard of this worker, in order, its logits and totals.
        """

    def distribute(self, dataset: tf.data.Dataset) -> BatchIterator:
        """Returns an iterator over `dataset`, a set without end, for the compiled steps."""
        return iter(dataset)

    def all_reduce(self, per_replica_tensors: PerReplicaTensors) -> PerReplicaTensors:
        """Sums tensors over the shards, exactly as a training step sums gradients.

        Args:
            per_replica_tensors: lists of V tensors, one for each replica of this worker.

        Returns:
            As many lists of V sums, placed like the argument, which is returned where there is
            nothing to sum.
        """
        return per_replica_tensors

    def local_gradients(
        self, replica: Replica, shard: Sequence[tf.Tensor], num_global_examples: tf.Tensor
    ) -> tuple[list[tf.Tensor], StepTotals]:
        """Computes the part of one shard in the gradients of the global batch's mean loss.

        It is the gradient of the sum of the shard's losses over the number of *all* examples.
        Summed over shards of any sizes, it is that of the mean over the global batch.

        Args:
            replica: its weights are taken.
            shard: images `(n_r, height, width, channels)` and labels `(n_r,)`.
            num_global_examples: int scalar, examples in the whole global batch.

        Returns:
            The gradients, one for each trainable variable, and the totals of the shard.
        """

        def loss_and_gradients(
            images: tf.Tensor, labels: tf.Tensor, num_global_examples: tf.Tensor
        ) -> tuple[tf.Tensor, StepTotals, list[tf.Tensor]]:
            with tf.GradientTape() as tape:
                logits = replica.model(images, training=True)
                loss, totals = shard_loss(
                    logits, labels, num_global_examples, label_smoothing=self._label_smoothing
                )
            variables = replica.model.trainable_variables
            return loss, totals, differentiate(tape, loss, variables, loss_scale=self._loss_scale)

        if self.jit_compile:
            loss_and_gradients = tf.function(loss_and_gradients, jit_compile=True)
        images, labels = shard
        loss, totals, gradients = loss_and_gradients(images, labels, num_global_examples)
        observed = Shard(images, labels, num_global_examples)
        return self.observer.on_shard(replica.replica_id, observed, loss, gradients), totals

    def apply_gradients(self, replica: Replica, summed_gradients: list[tf.Tensor]) -> None:
        """Updates the weights of a replica with gradients that are summed over the shards."""
        replica.optimizer.apply(summed_gradients, replica.model.trainable_variables)
        self.observer.on_update(replica.replica_id, summed_gradients)

    def classify(
        self,
        replica: Replica,
        shard: Sequence[tf.Tensor],
        num_global_examples: tf.Tensor,
        statistics: Statistics,
    ) -> LogitsAndTotals:
        """Computes the logits of a shard, which may be empty, and its totals; see `forward`."""
        images, labels = shard
        logits = predict_shard(replica.model, images, statistics)
        _, totals = shard_loss(logits, labels, num_global_examples)
        return logits, totals

    def gradient_buckets(self, tensors: Sequence[tf.Tensor]) -> GradientBuckets:
        """Returns the buckets in which a replica's tensors are summed."""
        return GradientBuckets(
            tensors, bucket_bytes=self._bucket_bytes, dtype=self._communication_dtype
        )

    @property
    def num_tracings(self) -> int:
        """How often the training loop has been traced: more than once means new shapes or types."""
        return self._train_loop.experimental_get_tracing_count()

    def train_steps(self, iterator: BatchIterator, num_steps: int) -> StepTotals:
        """Makes `num_steps` optimizer steps in one compiled call and returns their totals.

        The first call compiles the loop. `num_steps=0` compiles it and trains nothing.
        """
        return self._over_workers(_to_host(self._train_loop(iterator, tf.constant(num_steps))))

    def evaluate(
        self, dataset: tf.data.Dataset, on_batch: Callable[[], None] = lambda: None
    ) -> StepTotals:
        """Returns the totals over every example of `dataset`, each one seen once; changes no state.

        Args:
            dataset: of global batches, finite.
            on_batch: called after each of them; what it raises ends the evaluation.
        """
        iterator, statistics = self.distribute(dataset.repeat()), self._statistics_to_evaluate()
        totals = StepTotals(0.0, 0, 0)
        for _ in range(int(dataset.cardinality())):
            totals = totals.plus(_to_host(self._evaluate_batch(iterator, statistics)))
            on_batch()
        return self._over_workers(totals)

    def predict(self, images: np.ndarray, *, global_batch_size: int = 1000) -> np.ndarray:
        """Returns the logits of images, in input order; changes no state.

        Args:
            images: uint8 `(N, height, width, channels)`.
            global_batch_size: images of a batch over all shards.

        Returns:
            Floats `(N, num_classes)`.
        """
        labels = np.zeros(len(images), np.int32)
        dataset = tf.data.Dataset.from_tensor_slices((images, labels)).batch(global_batch_size)
        iterator, statistics = self.distribute(dataset.repeat()), self._statistics_to_evaluate()
        logits = []
        for _ in range(int(dataset.cardinality())):
            own = self._predict_batch(iterator, statistics).numpy()
            for message in self.workers.gather(own.tobytes()):
                logits.append(np.frombuffer(message, own.dtype).reshape(-1, *own.shape[1:]))
        return np.concatenate(logits)

    def _statistics_to_evaluate(self) -> Statistics:
        averages = self.averaged_statistics()
        with tf.device("CPU:0"):  # From the host each device copies what its batches need.
            return {name.removeprefix("model/"): tf.constant(a) for name, a in averages.items()}

    def _over_workers(self, totals: StepTotals) -> StepTotals:
        """Returns the totals of all workers, added in their order: each counts its own shards."""
        per_worker = self.workers.gather_arrays([np.asarray(value) for value in totals])
        return StepTotals.sum([StepTotals(*(a.item() for a in arrays)) for arrays in per_worker])

    @tf.function
    def _train_loop(self, iterator: BatchIterator, num_steps: tf.Tensor) -> StepTotals:
        totals = StepTotals.zeros()
        for _ in tf.range(num_steps):
            totals = totals.plus(self.train_step(iterator))
        return totals

    @tf.function
    def _evaluate_batch(self, iterator: BatchIterator, statistics: Statistics) -> StepTotals:
        shards = self.forward(iterator, statistics)
        return StepTotals.sum([StepTotals.zeros(), *(totals for _, totals in shards)])

    @tf.function
    def _predict_batch(self, iterator: BatchIterator, statistics: Statistics) -> tf.Tensor:
        return tf.concat([logits for logits, _ in self.forward(iterator, statistics)], axis=0)


def _to_host(totals: StepTotals) -> StepTotals:
    """Reads totals from the device: the one point where the host waits for a compiled call."""
    return StepTotals(*(np.asarray(value).item() for value in totals))
