"""Defines the contract between the training loop and a strategy.

The loop in `app/training/loop.py` uses nothing else. A subclass defines where the copies of the
weights are, which tensors are sent between devices, and in which order gradients are added. All
strategies share the rest: this file, `shard_step.py` and `copies.py`. Results of two strategies
can therefore only differ because of the subclasses.
"""

import abc
from collections.abc import Callable, Sequence

import keras
import numpy as np
import tensorflow as tf

from strategies import ALL_REDUCE_ALGORITHMS
from strategies.collectives import PerReplicaTensors
from strategies.compiled_steps import BatchIterator, CompiledSteps, to_host
from strategies.gradient_buckets import GradientBuckets
from strategies.observer import Observer
from strategies.shard_step import LogitsAndTotals, Statistics
from strategies.step_totals import StepTotals
from strategies.workers import Workers

ModelFn = Callable[[], keras.Model]
OptimizerFn = Callable[[], keras.optimizers.Optimizer]


class Strategy(CompiledSteps):
    """Trains a model on a list of devices.

    Datasets are `tf.data` datasets of global batches `(images, labels)`: uint8
    `(n, height, width, channels)` and int32 `(n,)`, where n may differ from batch to batch.

    The devices form R replicas of K consecutive devices. Each replica trains on its own part of
    every global batch; a part is one or more shards. There is one copy of the weights per replica,
    unless a subclass sets another number.

    Args:
        devices: names of the devices of all workers, for example `["/device:CPU:0"]`.
        workers: the processes that train together, with equal numbers of devices; None for a
            single process.
        all_reduce: the algorithm that sums the gradients over the shards: one of
            `all_reduce_algorithms`, "auto", or "none" to skip the all-reduce (to measure its cost).
        bucket_mib: size of the gradient buckets of the all-reduce, in 2²⁰ bytes; 0 for one
            all-reduce per gradient, None for the strategy's default.
        communication_dtype: dtype of the all-reduce; None for the dtype of the gradients.
        jit_compile: compile loss and gradients of a shard with XLA.
        batch_norm: "average" normalises each shard separately, "sync" normalises over the global
            batch.
        accumulate_steps: shards per replica; a replica adds their gradients before the all-reduce.
        shard_weights: relative sizes of the replicas' parts, whole numbers; empty for equal parts.
        model_parallel: K, devices per replica.
        label_smoothing: see `strategies.loss.shard_loss`.

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
        batch_norm: str = "average",
        accumulate_steps: int = 1,
        shard_weights: Sequence[int] = (),
        model_parallel: int = 1,
    ):
        self.devices, self.workers = list(devices), workers or Workers()
        self.num_devices, self.devices_per_replica = len(self.devices), model_parallel
        self.num_replicas = self.num_copies = len(self.devices) // model_parallel
        self.shards_per_replica = accumulate_steps
        self.num_shards = self.num_replicas * accumulate_steps
        weights = list(shard_weights) or [1] * self.num_replicas
        self._check_numbers(weights)
        self.shard_weights = [weight for weight in weights for _ in range(accumulate_steps)]
        self.syncs_batch_norm, self.jit_compile = batch_norm == "sync", jit_compile
        self.observer = Observer()
        self.algorithm = self.default_all_reduce() if all_reduce == "auto" else all_reduce
        self._label_smoothing = label_smoothing
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

    def _check_numbers(self, replica_weights: Sequence[int]) -> None:
        if self.num_replicas * self.devices_per_replica != self.num_devices:
            raise ValueError(
                f"--model_parallel={self.devices_per_replica} must divide the"
                f" {self.num_devices} devices"
            )
        if len(replica_weights) != self.num_replicas:
            raise ValueError(
                f"--shard_weights={','.join(map(str, replica_weights))} must have a weight for each"
                f" of {self.num_replicas} replicas"
            )

    @property
    def all_reduce_algorithms(self) -> tuple[str, ...]:
        """The all-reduce algorithms of this strategy, from `strategies.ALL_REDUCE_ALGORITHMS`."""
        return ALL_REDUCE_ALGORITHMS.get(self.name, ())

    def default_all_reduce(self) -> str:
        """Returns the algorithm that "auto" stands for on these devices."""
        return "reduce_to_one"

    @property
    def gather_groups(self) -> list[list[str]]:
        """Groups of devices that all-gather tensors within a step."""
        return []

    def default_bucket_mib(self) -> float:
        """Returns the default bucket size in MiB; 0 for one all-reduce per gradient."""
        return 0.0

    @property
    def local_devices(self) -> list[str]:
        """The devices of this worker."""
        ids = self._local(self.num_devices)
        return self.devices[ids.start : ids.stop]

    @property
    def local_replica_devices(self) -> list[str]:
        """The first device of each replica of this worker."""
        return self.local_devices[:: self.devices_per_replica]

    @abc.abstractmethod
    def build(self, model_fn: ModelFn, optimizer_fn: OptimizerFn) -> None:
        """Builds every copy of the model and its optimizer, all with the same weights."""

    @abc.abstractmethod
    def forward(self, iterator: BatchIterator, statistics: Statistics) -> list[LogitsAndTotals]:
        """Computes the logits of one global batch without training (traced in a graph).

        Args:
            iterator: yields global batches.
            statistics: path of a variable → tensor that replaces the copy's value.

        Returns:
            For each replica of this worker, in order, the logits and totals of its examples.
        """

    def distribute(self, dataset: tf.data.Dataset) -> BatchIterator:
        """Returns an iterator over `dataset`, which repeats forever, for the compiled steps."""
        return iter(dataset)

    def all_reduce(self, per_replica_tensors: PerReplicaTensors) -> PerReplicaTensors:
        """Sums tensors over the replicas, exactly as a training step sums gradients.

        Args:
            per_replica_tensors: one list of V tensors per replica of this worker.

        Returns:
            One list of V sums per replica, placed like the input. With one replica, the input.
        """
        return per_replica_tensors

    def gradient_buckets(self, tensors: Sequence[tf.Tensor]) -> GradientBuckets:
        """Returns the all-reduce buckets for a replica's tensors."""
        return GradientBuckets(
            tensors, bucket_bytes=self._bucket_bytes, dtype=self._communication_dtype
        )

    def evaluate(
        self, dataset: tf.data.Dataset, on_batch: Callable[[], None] = lambda: None
    ) -> StepTotals:
        """Returns the totals over every example of `dataset`, each counted once; changes no state.

        Args:
            dataset: global batches; finite.
            on_batch: called after each batch; an exception that it raises ends the evaluation.
        """
        iterator, statistics = self.distribute(dataset.repeat()), self._statistics_to_evaluate()
        totals = StepTotals(0.0, 0, 0)
        for _ in range(int(dataset.cardinality())):
            totals = totals.plus(to_host(self._evaluate_batch(iterator, statistics)))
            on_batch()
        return self._over_workers(totals)

    def predict(self, images: np.ndarray, *, global_batch_size: int = 1000) -> np.ndarray:
        """Returns the logits of images, in input order; changes no state.

        Args:
            images: uint8 `(N, height, width, channels)`.
            global_batch_size: images per global batch.

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
        with tf.device("CPU:0"):  # Each device copies the values that it needs from the host.
            return {name.removeprefix("model/"): tf.constant(a) for name, a in averages.items()}

    @tf.function(autograph=False)
    def _evaluate_batch(self, iterator: BatchIterator, statistics: Statistics) -> StepTotals:
        shards = self.forward(iterator, statistics)
        return StepTotals.sum([StepTotals.zeros(), *(totals for _, totals in shards)])

    @tf.function(autograph=False)
    def _predict_batch(self, iterator: BatchIterator, statistics: Statistics) -> tf.Tensor:
        return tf.concat([logits for logits, _ in self.forward(iterator, statistics)], axis=0)
