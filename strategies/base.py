"""The contract between the training loop and a strategy.

The loop in `app/training/loop.py` sees nothing but this. Whatever differs between two ways of
training stands in a subclass; the compiled loops are the same code for all of them and stand here,
and the reading and writing of state in `replicas.py`, so that a difference in results can only come
from a subclass.
"""

import abc
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from strategies import ALL_REDUCE_ALGORITHMS
from strategies.gradient_buckets import GradientBuckets
from strategies.observer import Observer
from strategies.replicas import Replicas
from strategies.workers import Workers


class StepTotals(NamedTuple):
    """Sums over examples, never means: sums of shards, batches and calls simply add up.

    Each field is a scalar, a tensor inside a compiled step and a Python number outside. The loss
    is a float64: float32 losses of a few thousand batches add up in it without rounding, so that
    the total does not depend on how many steps were put into one call.
    """

    loss_sum: tf.Tensor | float
    correct: tf.Tensor | int
    examples: tf.Tensor | int

    @classmethod
    def zeros(cls) -> "StepTotals":
        """Returns totals over no examples, as tensors."""
        return cls(tf.zeros([], tf.float64), tf.zeros([], tf.int64), tf.zeros([], tf.int64))

    def plus(self, other: "StepTotals") -> "StepTotals":
        """Returns the totals over the examples of both."""
        return StepTotals(*(a + b for a, b in zip(self, other, strict=True)))

    @classmethod
    def sum(cls, many: "Sequence[StepTotals]") -> "StepTotals":
        """Returns the totals over the examples of all, added from the first to the last."""
        return functools.reduce(cls.plus, many)

    @property
    def loss(self) -> float:
        """Mean loss of an example."""
        return self.loss_sum / self.examples

    @property
    def accuracy(self) -> float:
        """Fraction of the examples that were classified correctly, in [0, 1]."""
        return self.correct / self.examples


ModelFn = Callable[[], keras.Model]
OptimizerFn = Callable[[], keras.optimizers.Optimizer]
BatchIterator = Any  # TensorFlow has several types for what `distribute` returns.
# Of a shard: the logits `(n_r, 10)` and the totals; the loss, the totals and the gradients.
LogitsAndTotals = tuple[tf.Tensor, StepTotals]
LossAndGradients = tuple[tf.Tensor, StepTotals, list[tf.Tensor]]


class Strategy(Replicas):
    """One way to train a model on a list of devices.

    Data sets are `tf.data` sets of global batches `(images, labels)`: uint8
    `(n, height, width, channels)` and int32 `(n,)`, where n may differ from batch to batch.

    Args:
        devices: names of the devices, one replica on each, for example `["/device:CPU:0"]`.
        all_reduce: name of the algorithm that adds the gradients over the replicas, or "auto".
        workers: the processes that train together, each with as many of the devices; None for this
            one alone.
        bucket_mib: gradients are exchanged in buckets of this size, in 2²⁰ bytes; 0 for each one by
            itself, None for what is best.
        communication_dtype: in which they are exchanged, None for their own.
        jit_compile: let XLA compile what a replica computes by itself: loss and gradients.
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
        self.jit_compile = jit_compile
        self.label_smoothing, self.loss_scale = label_smoothing, loss_scale
        bucket_mib = self.default_bucket_mib() if bucket_mib is None else bucket_mib
        self._bucket_bytes, self._communication_dtype = (
            round(bucket_mib * 2**20),
            communication_dtype,
        )
        self.observer = Observer()  # To be replaced before the first step, if at all.
        # To be set before the first step, to measure what the all-reduce costs: each replica
        # then goes on with its own gradient.
        self.no_sync = False
        self.algorithm = self.default_all_reduce() if all_reduce == "auto" else all_reduce
        choices = ("auto", *self.all_reduce_algorithms)
        if all_reduce not in choices:
            raise ValueError(
                f"all_reduce={all_reduce} with strategy {self.name} — one of"
                f" {', '.join(choices)} is required"
            )

    @property
    def all_reduce_algorithms(self) -> tuple[str, ...]:
        """Names of the algorithms to choose from, of `strategies.ALL_REDUCE_ALGORITHMS`."""
        return ALL_REDUCE_ALGORITHMS.get(self.name, ())

    def default_all_reduce(self) -> str:
        """Returns what "auto" stands for on these devices."""
        return "reduce_to_one"

    def default_bucket_mib(self) -> float:
        """Returns the best size of buckets, 0 for each gradient by itself."""
        return 0.0

    @property
    def num_replicas(self) -> int:
        """How many copies of the model are trained, one on each device, over all workers."""
        return len(self.devices)

    @property
    def local_devices(self) -> list[str]:
        """The devices of this worker."""
        return [self.devices[replica_id] for replica_id in self.local_replica_ids]

    @abc.abstractmethod
    def build(
        self,
        model_fn: ModelFn,
        optimizer_fn: OptimizerFn,
    ) -> None:
        """Makes one replica of model and optimizer on each device, all with the same weights."""

    @abc.abstractmethod
    def distribute(self, dataset: tf.data.Dataset) -> BatchIterator:
        """Returns an iterator over `dataset`, a set without end, for the compiled steps."""

    @abc.abstractmethod
    def train_step(self, iterator: BatchIterator) -> StepTotals:
        """Takes one global batch and makes one optimizer step on every replica (in a graph)."""

    @abc.abstractmethod
    def forward(self, iterator: BatchIterator) -> list[LogitsAndTotals]:
        """Takes one global batch and classifies it, training nothing (in a graph).

        Returns, for each replica of this worker in order, the logits `(n_r, num_classes)` and
        the totals of its shard.
        """

    @abc.abstractmethod
    def all_reduce(self, per_replica_tensors: list[list[tf.Tensor]]) -> list[list[tf.Tensor]]:
        """Adds tensors over the replicas by the very all-reduce that a training step uses.

        Args:
            per_replica_tensors: lists of V tensors, one for each replica of this worker.

        Returns:
            As many lists of V totals: what each replica was told the sums are.
        """

    @abc.abstractmethod
    def repeat_all_reduce(
        self, per_replica_tensors: list[list[tf.Tensor]], num_times: int
    ) -> list[list[tf.Tensor]]:
        """Makes `num_times` exchanges in one compiled call, each of what the last one returned.

        Nothing else happens in it, so its time is that of the exchange. The first call for some
        shapes compiles it.

        Returns:
            What the last one returned, for a caller to wait for.
        """

    def gradient_buckets(self, tensors: Sequence[tf.Tensor]) -> GradientBuckets:
        """Returns how a replica's tensors are packed for the exchange."""
        return GradientBuckets(
            tensors, bucket_bytes=self._bucket_bytes, dtype=self._communication_dtype
        )

    def compiled(self, function: Callable) -> Callable:
        """Returns a replica's computation, which crosses to no other one, as XLA compiles it.

        Without `jit_compile` that is the function itself.
        """
        return tf.function(function, jit_compile=True) if self.jit_compile else function

    @property
    def num_tracings(self) -> int:
        """How often the training loop has been traced: more than once means new shapes or types."""
        return self._train_loop.experimental_get_tracing_count()

    def train_steps(self, iterator: BatchIterator, num_steps: int) -> StepTotals:
        """Makes `num_steps` optimizer steps in one compiled call and returns their totals.

        The first call compiles the loop. `num_steps=0` compiles it and trains nothing.
        """
        return self._over_workers(_to_host(self._train_loop(iterator, tf.constant(num_steps))))

    def _over_workers(self, totals: StepTotals) -> StepTotals:
        """Returns the totals of all workers, added in their order: each counts its own shards."""
        per_worker = self.workers.gather_arrays([np.asarray(value) for value in totals])
        return StepTotals.sum([StepTotals(*(a.item() for a in arrays)) for arrays in per_worker])

    def evaluate(
        self, dataset: tf.data.Dataset, on_batch: Callable[[], None] = lambda: None
    ) -> StepTotals:
        """Returns the totals over every example of `dataset`, each one seen once.

        Args:
            dataset: of global batches, finite.
            on_batch: called after each of them; what it raises ends the evaluation.
        """
        self.average_moving_statistics()
        iterator = self.distribute(dataset.repeat())
        totals = StepTotals(0.0, 0, 0)
        for _ in range(int(dataset.cardinality())):
            totals = totals.plus(_to_host(self._evaluate_batch(iterator)))
            on_batch()
        return self._over_workers(totals)

    def predict(self, images: np.ndarray, *, global_batch_size: int = 1000) -> np.ndarray:
        """Returns the logits of images, in input order.

        Args:
            images: uint8 `(N, height, width, channels)`.
            global_batch_size: images of a batch over all replicas.

        Returns:
            Floats `(N, num_classes)`.
        """
        self.average_moving_statistics()
        labels = np.zeros(len(images), np.int32)
        dataset = tf.data.Dataset.from_tensor_slices((images, labels)).batch(global_batch_size)
        iterator = self.distribute(dataset.repeat())
        num_batches = int(dataset.cardinality())
        logits = []
        for _ in range(num_batches):
            own = self._predict_batch(iterator).numpy()
            for message in self.workers.gather(own.tobytes()):
                logits.append(np.frombuffer(message, own.dtype).reshape(-1, *own.shape[1:]))
        return np.concatenate(logits)

    @tf.function
    def _train_loop(self, iterator: BatchIterator, num_steps: tf.Tensor) -> StepTotals:
        totals = StepTotals.zeros()
        for _ in tf.range(num_steps):
            totals = totals.plus(self.train_step(iterator))
        return totals

    @tf.function
    def _evaluate_batch(self, iterator: BatchIterator) -> StepTotals:
        return StepTotals.sum([StepTotals.zeros(), *(shard for _, shard in self.forward(iterator))])

    @tf.function
    def _predict_batch(self, iterator: BatchIterator) -> tf.Tensor:
        return tf.concat([logits for logits, _ in self.forward(iterator)], axis=0)


def classify(model: keras.Model, images: tf.Tensor) -> tf.Tensor:
    """Returns the logits `(n, num_classes)` of a shard, which may be empty in evaluation.

    An empty shard gets one blank image, whose logits are dropped: oneDNN's fused convolutions
    refuse to work on none.
    """
    num_images = tf.shape(images)[0]
    blanks = tf.cast(num_images == 0, tf.int32)
    padded = tf.pad(images, [[0, blanks], [0, 0], [0, 0], [0, 0]])
    return model(padded, training=False)[:num_images]


def _to_host(totals: StepTotals) -> StepTotals:
    """Reads totals from the device: the one point where the host waits for a compiled call."""
    return StepTotals(*(np.asarray(value).item() for value in totals))
