"""Defines what all strategies share apart from their training step; read `manual.py` first."""

import abc
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from strategies import ALL_REDUCE_ALGORITHMS
from strategies.collectives import shard_bounds
from strategies.state import CopyStates, State, Variables, named_variables, split_bytes

ModelFn = Callable[[], keras.Model]
OptimizerFn = Callable[[], keras.optimizers.Optimizer]
BatchIterator = Any  # TensorFlow has several types for what `distribute` returns.
Statistics = Mapping[str, tf.Tensor]  # Path of a variable → the value that replaces it.


class Shard(NamedTuple):
    """The examples of one replica in a step.

    Attributes:
        images: uint8 `(n_r, height, width, channels)`, n_r the size of the shard.
        labels: int32 `(n_r,)`.
        num_global_examples: int scalar, number of examples in the global batch.
    """

    images: tf.Tensor
    labels: tf.Tensor
    num_global_examples: tf.Tensor


class StepTotals(NamedTuple):
    """Sums over examples, which add up over shards, batches and calls.

    Each field is a scalar: a tensor inside a compiled step and a Python number outside. The loss is
    float64, so that the sum of a few thousand float32 losses does not depend on the steps per call.
    """

    loss_sum: tf.Tensor | float
    correct: tf.Tensor | int
    examples: tf.Tensor | int

    @classmethod
    def of(cls, logits: tf.Tensor, labels: tf.Tensor) -> "StepTotals":
        """Computes the totals of a shard; its loss is without label smoothing, as a test loss is.

        As in `sum_of_losses`, logits are float `(n, num_classes)` and labels int32 `(n,)`.
        """
        losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, tf.cast(logits, tf.float32))
        predictions = tf.argmax(logits, axis=-1, output_type=labels.dtype)
        return cls(
            loss_sum=tf.cast(tf.reduce_sum(losses), tf.float64),
            correct=tf.math.count_nonzero(predictions == labels),
            examples=tf.size(labels, out_type=tf.int64),
        )

    @classmethod
    def sum(cls, many: "Sequence[StepTotals]") -> "StepTotals":
        """Returns the sum of totals, added in order."""
        fields = zip(*many, strict=True)
        return cls(*(functools.reduce(lambda a, b: a + b, field) for field in fields))

    @property
    def loss(self) -> float:
        """Mean loss per example."""
        return self.loss_sum / self.examples

    @property
    def accuracy(self) -> float:
        """Fraction of correctly classified examples, in [0, 1]."""
        return self.correct / self.examples


class Replica(NamedTuple):
    """A copy of the model, and the optimizer of its weights."""

    model: keras.Model
    optimizer: keras.optimizers.Optimizer

    @classmethod
    def build(cls, model_fn: ModelFn, optimizer_fn: OptimizerFn) -> "Replica":
        """Creates model and optimizer, with all variables, on the current device."""
        model, optimizer = model_fn(), optimizer_fn()
        optimizer.build(model.trainable_variables)
        return cls(model, optimizer)

    @property
    def weights(self) -> list[tf.Variable]:
        """The trainable weights."""
        return [variable.value for variable in self.model.trainable_variables]


class Observer:
    """The hooks of a training step, called while it is traced; the default methods do nothing.

    `verify` records steps with an observer, and `--inject` injects a fault.
    """

    def on_shard(
        self,
        shard_id: int | tf.Tensor,
        shard: Shard,
        logits: tf.Tensor,
        loss: tf.Tensor,
        gradients: list[tf.Tensor],
    ) -> list[tf.Tensor]:
        """Returns the gradients of a shard to sum over the shards; called on the shard's device.

        Args:
            shard_id: an int, or an int scalar tensor.
            shard: the examples.
            logits: `(n_r, num_classes)`, in the dtype of the last layer.
            loss: scalar, the shard's part of the mean loss of the global batch.
            gradients: of `loss`, one per trainable variable.
        """
        return gradients

    def on_update(self, copy_id: int | tf.Tensor, summed_gradients: list[tf.Tensor]) -> None:
        """Observes a copy of the weights after its update; called on the copy's device.

        `summed_gradients` are sums over all shards, one per trainable variable.
        """
        return  # AutoGraph cannot transform a function without a statement.


class Workers:
    """The processes that train together; this class is for a single process.

    All workers call every method in the same order, and it returns the same result on each.
    """

    index, count = 0, 1  # Of this worker, and of all; worker 0 is the chief.

    @property
    def is_chief(self) -> bool:
        """Whether this is worker 0, which writes all files."""
        return self.index == 0

    def local_range(self, count: int) -> range:
        """Returns this worker's part of `count` items, of which all workers have equally many."""
        num_local = count // self.count
        return range(self.index * num_local, (self.index + 1) * num_local)

    def gather(self, message: bytes) -> list[bytes]:
        """Returns the messages of all workers, in order of workers."""
        return [message]

    def broadcast(self, message: bytes = b"") -> bytes:
        """Returns the chief's message; the other workers' arguments are ignored."""
        return message

    def leave(self) -> None:
        """Waits until no worker needs another one, so that each can end; gives up soon."""

    def all_reduce_max(self, *numbers: float) -> list[float]:
        """Returns the maximum over the workers of each number, such as the time of a clock."""
        messages = self.gather(np.array(numbers, float).tobytes())
        return np.max([np.frombuffer(message) for message in messages], axis=0).tolist()

    def gather_arrays(self, arrays: Sequence[np.ndarray]) -> list[list[np.ndarray]]:
        """Returns the arrays of all workers, in order; shapes and dtypes must be the same."""
        if self.count == 1:
            return [list(arrays)]
        messages = self.gather(b"".join(array.tobytes() for array in arrays))
        return [split_bytes(message, arrays) for message in messages]


class Strategy(abc.ABC):
    """Trains a model on a list of devices: R devices, R shards of each batch, R copies of weights.

    Datasets are `tf.data` datasets of global batches `(images, labels)`: uint8
    `(n, height, width, channels)` and int32 `(n,)`, where n may differ from batch to batch.

    Args:
        devices: names of the devices of all workers, for example `["/device:CPU:0"]`.
        all_reduce: algorithm of the all-reduce; "auto" for the default of the strategy.
        batch_norm: "average" or "sync": whether BatchNorm normalises each shard by itself or the
            whole batch; "sync" needs a strategy of `tf.distribute`.
        workers: the processes that train together, with equal numbers of devices; None for a
            single process.
        label_smoothing: see `sum_of_losses`.

    Attributes:
        num_replicas, num_shards, num_copies: R, over all workers; `sharded` has one copy.
        algorithm: algorithm of the all-reduce.
        observer: hooks of the training step; replace it only before the first step.
        replicas: the copies of this worker, after `build`.

    Raises:
        ValueError: this strategy cannot run on these devices or has no such algorithm.
    """

    name: str
    replicas: list[Replica]

    def __init__(
        self,
        devices: Sequence[str],
        *,
        all_reduce: str = "auto",
        batch_norm: str = "average",
        workers: Workers | None = None,
        label_smoothing: float = 0.0,
    ):
        choices = ("auto", *ALL_REDUCE_ALGORITHMS.get(self.name, ()))
        if all_reduce not in choices:
            raise ValueError(
                f"--all_reduce of strategy {self.name} must be one of {', '.join(choices)}, got"
                f" {all_reduce}"
            )
        self.devices, self.workers = list(devices), workers or Workers()
        self.num_replicas = self.num_shards = self.num_copies = len(devices)
        self.label_smoothing, self.syncs_batch_norm = label_smoothing, batch_norm == "sync"
        self.algorithm = self.default_all_reduce() if all_reduce == "auto" else all_reduce
        self.observer = Observer()
        # AutoGraph would convert every function that a step calls: half of the tracing time.
        self._train = tf.function(self._train_loop, autograph=False)
        self._train_observed = tf.function(self._train_loop, autograph=False)
        self._evaluate = tf.function(self.evaluate_step, autograph=False)
        self.prepare()

    def prepare(self) -> None:
        """Checks the devices and sets attributes of the strategy; the last step of init."""
        return

    def default_all_reduce(self) -> str:
        """Returns the algorithm that "auto" stands for on these devices."""
        return "reduce_to_one"

    @abc.abstractmethod
    def build(self, model_fn: ModelFn, optimizer_fn: OptimizerFn) -> None:
        """Builds every copy of the model and its optimizer, all with the same weights."""

    @abc.abstractmethod
    def train_step(self, iterator: BatchIterator) -> StepTotals:
        """Trains on one global batch: one optimizer step of every copy (traced in a graph)."""

    @abc.abstractmethod
    def evaluate_step(self, iterator: BatchIterator, statistics: Statistics) -> StepTotals:
        """Evaluates one global batch with these moving statistics (traced in a graph)."""

    def all_reduce(self, per_replica_tensors: list[list[tf.Tensor]]) -> list[list[tf.Tensor]]:
        """Sums tensors over the replicas, exactly as a training step sums gradients.

        Both lists have one list of V tensors per replica of this worker, on its device.
        """
        return per_replica_tensors

    def distribute(self, dataset: tf.data.Dataset) -> BatchIterator:
        """Returns an iterator over `dataset`, which repeats forever, for the compiled steps."""
        return iter(dataset)

    def copies(self) -> list[Variables]:
        """Returns name → variable for each copy on this worker: the model's, the optimizer's."""
        return [named_variables(replica.model, replica.optimizer) for replica in self.replicas]

    def shard_variables(self) -> list[Variables]:
        """Returns name → variable for the variables of each shard, such as moving statistics."""
        return [
            {f"model/{v.path}": v.value for v in replica.model.non_trainable_variables}
            for replica in self.replicas
        ]

    @property
    def model(self) -> keras.Model:
        """The model of the first copy on this worker."""
        return self.replicas[0].model

    @property
    def optimizer(self) -> keras.optimizers.Optimizer:
        """The optimizer of the first copy on this worker."""
        return self.replicas[0].optimizer

    def train_steps(self, iterator: BatchIterator, num_steps: int) -> StepTotals:
        """Runs optimizer steps in one compiled call and returns their totals; 0 only compiles."""
        return self._on_host(self._train(iterator, tf.constant(num_steps)))

    def train_observed_steps(
        self, iterator: BatchIterator, num_steps: int, observer: Observer
    ) -> StepTotals:
        """Runs the same steps, compiled with another observer, the same object in every call."""
        before, self.observer = self.observer, observer  # Tracing the loop calls the observer.
        try:
            return self._on_host(self._train_observed(iterator, tf.constant(num_steps)))
        finally:
            self.observer = before

    def _train_loop(self, iterator: BatchIterator, num_steps: tf.Tensor) -> StepTotals:
        def train(step: tf.Tensor, totals: StepTotals) -> tuple[tf.Tensor, StepTotals]:
            return step + 1, StepTotals.sum([totals, self.train_step(iterator)])

        zero = tf.zeros([], tf.int64)
        start = tf.constant(0), StepTotals(tf.zeros([], tf.float64), zero, zero)
        return tf.while_loop(lambda step, _: step < num_steps, train, start)[1]

    def evaluate(
        self, dataset: tf.data.Dataset, on_batch: Callable[[], None] = lambda: None
    ) -> StepTotals:
        """Returns the totals over every example of a finite dataset, each counted once.

        Changes no state. Calls `on_batch` after each batch, which may end the evaluation by an
        exception.
        """
        averages = self.states.averaged_statistics()
        with tf.device("CPU:0"):  # Each device copies the values that it needs from the host.
            statistics = {n.removeprefix("model/"): tf.constant(a) for n, a in averages.items()}
        iterator, per_batch = self.distribute(dataset.repeat()), [StepTotals(0.0, 0, 0)]
        for _ in range(int(dataset.cardinality())):
            per_batch.append(self._on_host(self._evaluate(iterator, statistics)))
            on_batch()
        return StepTotals.sum(per_batch)

    def _on_host(self, totals: StepTotals) -> StepTotals:
        """Waits for a compiled call; returns its totals over all workers, added in their order."""
        per_worker = self.workers.gather_arrays([np.asarray(value) for value in totals])
        return StepTotals.sum([StepTotals(*(a.item() for a in arrays)) for arrays in per_worker])

    @functools.cached_property
    def states(self) -> CopyStates:
        """Reads and writes the variables of the copies and shards, after `build`."""
        return CopyStates(self.copies(), self.shard_variables(), self.num_shards, self.workers)

    def state(self) -> State:
        """Returns the state to save, one whole copy, which any other strategy can load."""
        return self.states.averaged()

    def load_state(self, state: State) -> None:
        """Assigns a state to all copies and shards; raises `ValueError` for another model's."""
        self.states.load(state)

    def shard_bounds(self, num_examples: Any, shard_id: Any) -> tuple[Any, Any]:
        """Returns the start and end of a shard in a batch; see `collectives.shard_bounds`."""
        return shard_bounds(num_examples, self.num_shards, shard_id)

    @property
    def local_copy_ids(self) -> range:
        """Ids of the copies that this worker holds."""
        return self.workers.local_range(self.num_copies)

    @property
    def local_shard_ids(self) -> range:
        """Ids of the shards that this worker trains on."""
        return self.workers.local_range(self.num_shards)

    @property
    def local_devices(self) -> list[str]:
        """The devices of this worker."""
        return [self.devices[i] for i in self.local_shard_ids]


def sum_of_losses(logits: tf.Tensor, labels: tf.Tensor, label_smoothing: float = 0.0) -> tf.Tensor:
    """Computes the sum of the cross-entropies of a shard, a float32 scalar.

    A strategy divides this *sum* by the number of examples in the *whole* global batch. Gradients
    of this loss, summed over the replicas, are therefore the exact gradient of the mean over the
    global batch, however unevenly it is split; a mean of means would give examples of a small shard
    more weight. Keras losses divide by the number of replicas inside `tf.distribute`.

    Args:
        logits: float `(n, num_classes)`, n the size of this shard, which may be 0.
        labels: int32 `(n,)`, in 0 to num_classes − 1.
        label_smoothing: fraction of the target that is spread evenly over all classes.
    """
    logits = tf.cast(logits, tf.float32)
    losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits)
    if not label_smoothing:
        return tf.reduce_sum(losses)
    # The mean of −log p over the classes is log Σ exp(logits) − mean(logits).
    evenly = tf.reduce_logsumexp(logits, axis=-1) - tf.reduce_mean(logits, axis=-1)
    return (1 - label_smoothing) * tf.reduce_sum(losses) + label_smoothing * tf.reduce_sum(evenly)


def classify(
    model: keras.Model,
    shard: Shard,
    statistics: Statistics,
    weights: Sequence[tf.Tensor] = (),
) -> StepTotals:
    """Computes the totals of a shard, which may be empty, on the current device.

    Args:
        model: the model; its variables are replaced for this call only.
        shard: the examples.
        statistics: the moving statistics.
        weights: tensors that replace the model's trainable weights; empty to use the model's.
    """
    values = [(v, statistics[v.path]) for v in model.variables if v.path in statistics]
    values += zip(model.trainable_variables, weights, strict=False)
    # oneDNN's fused convolutions fail on an empty batch: it is padded with a blank image, whose
    # logits are removed.
    num_images = tf.shape(shard.images)[0]
    num_blanks = tf.cast(num_images == 0, tf.int32)
    padding = [[0, num_blanks], *[[0, 0]] * (len(shard.images.shape) - 1)]
    with keras.StatelessScope(state_mapping=values):
        logits = model(tf.pad(shard.images, padding), training=False)[:num_images]
    return StepTotals.of(logits, shard.labels)
