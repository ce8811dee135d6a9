"""Defines the base class of all strategies: the contract, and the training step on one shard.

The training loop in `app/training/loop.py` uses only the contract. A subclass defines where the
copies of the weights are, which tensors are sent between devices, and in which order gradients are
added. Accumulation, hooks and the loss scale stand here, once for all strategies, so that results
of two strategies can only differ because of the subclasses.
"""

import abc
import functools
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from strategies import ALL_REDUCE_ALGORITHMS
from strategies.collectives import PerReplicaTensors, weighted_bounds
from strategies.compiled_steps import BatchIterator, CompiledSteps
from strategies.copies import CopyStates, State, Variables
from strategies.device_tape import DeviceTape
from strategies.evaluation import Evaluation, LogitsAndTotals, Statistics
from strategies.gradient_buckets import GradientBuckets
from strategies.layer_calls import with_values
from strategies.layout import layout_of
from strategies.loss import loss_scale_of, sum_of_losses, unscaled
from strategies.observer import Observer, Shard
from strategies.replica import Replica, copies_of
from strategies.step_totals import StepTotals
from strategies.workers import Workers

ModelFn = Callable[[], keras.Model]
OptimizerFn = Callable[[], keras.optimizers.Optimizer]
Bounds = tuple[tf.Tensor, tf.Tensor]


class Strategy(abc.ABC):
    """Trains a model on a list of devices.

    Datasets are `tf.data` datasets of global batches `(images, labels)`: uint8
    `(n, height, width, channels)` and int32 `(n,)`, where n may differ from batch to batch.

    The devices form R replicas of K consecutive devices. Each replica trains on its own part of
    every global batch; a part is one or more shards. There is one copy of the weights per replica,
    unless a subclass sets another number.

    Args:
        devices: names of the devices of all workers, for example `["/device:CPU:0"]`.
        options: the options of this strategy: `Config.distribution`, or an object with its
            attributes.
        workers: the processes that train together, with equal numbers of devices; None for a
            single process.
        label_smoothing: see `strategies.loss.sum_of_losses`.

    Attributes:
        num_devices: number of devices, over all workers.
        num_shards: number of shards of a global batch; each has its own examples, loss, gradients
            and BatchNorm statistics.
        num_copies: number of copies of the weights, over all workers.
        shard_weights: relative sizes of all shards.
        observer: hooks of the training step; replace it only before the first step.
        bucket_mib: size of the gradient buckets of the all-reduce, in 2²⁰ bytes; 0 for one
            all-reduce per gradient. Replace it only before the first step.
        steps: the compiled loop over `train_step`.
        model: the model of the first copy on this worker, after `build`.
        optimizer: the optimizer of the first copy on this worker, after `build`.

    Raises:
        ValueError: this strategy cannot run on these devices or has no such algorithm.
    """

    name: str
    bucket_mib = 0.0
    model: keras.Model
    optimizer: keras.optimizers.Optimizer

    def __init__(
        self,
        devices: Sequence[str],
        options: Any,
        workers: Workers | None = None,
        *,
        label_smoothing: float = 0.0,
    ):
        self.options, self.label_smoothing = options, label_smoothing
        self.devices, self.workers = list(devices), workers or Workers()
        self.num_devices = len(devices)
        self.layout = layout = layout_of(self.name, options, self.num_devices)
        self.num_replicas, self.num_copies = layout.num_replicas, layout.num_copies
        self.num_shards = layout.num_shards
        self.devices_per_replica = layout.devices_per_replica
        self.shards_per_replica = layout.shards_per_replica
        self._check_options()
        self.shard_weights = [w for w in layout.weights for _ in range(self.shards_per_replica)]
        self.syncs_batch_norm = options.batch_norm == "sync"
        self.observer = Observer()
        automatic = options.all_reduce == "auto"
        self.algorithm = self.default_all_reduce() if automatic else options.all_reduce
        self.steps = CompiledSteps(self.train_step, self.workers)
        self._observed_steps = CompiledSteps(self.train_step, self.workers)
        self._evaluation = Evaluation(self.forward, self.distribute, self.workers)
        self.prepare()

    def _check_options(self) -> None:
        if self.num_replicas * self.devices_per_replica != self.num_devices:
            raise ValueError(
                f"--model_parallel={self.devices_per_replica} must divide the"
                f" {self.num_devices} devices"
            )
        weights = self.layout.weights
        if len(weights) != self.num_replicas:
            raise ValueError(
                f"--shard_weights={','.join(map(str, weights))} must have a weight for each"
                f" of {self.num_replicas} replicas"
            )
        algorithms = ALL_REDUCE_ALGORITHMS.get(self.name, ())
        asked, choices = self.options.all_reduce, ("auto", *algorithms)
        can_leave_out = bool(algorithms) and asked == "none"
        if asked not in choices and not can_leave_out:
            raise ValueError(
                f"--all_reduce of strategy {self.name} must be one of {', '.join(choices)}, got"
                f" {asked}"
            )

    # --- What a subclass defines ---------------------------------------------------------------

    def prepare(self) -> None:
        """Checks the options of this strategy and sets its own attributes; the last step of init.

        Raises:
            ValueError: this strategy cannot run on these devices or with these options.
        """
        return

    @abc.abstractmethod
    def build(self, model_fn: ModelFn, optimizer_fn: OptimizerFn) -> None:
        """Builds every copy of the model and its optimizer, all with the same weights."""

    @abc.abstractmethod
    def train_step(self, iterator: BatchIterator) -> StepTotals:
        """Trains on one global batch: one optimizer step of every copy (traced in a graph)."""

    @abc.abstractmethod
    def forward(self, iterator: BatchIterator, statistics: Statistics) -> list[LogitsAndTotals]:
        """Computes the logits of one global batch without training (traced in a graph).

        Args:
            iterator: yields global batches.
            statistics: path of a variable → tensor that replaces the copy's value.

        Returns:
            For each replica of this worker, in order, the logits and totals of its examples.
        """

    @abc.abstractmethod
    def copies(self) -> list[Variables]:
        """Returns the variables of each copy on this worker: name → variable.

        The order is the same in all copies: the model's variables, then the optimizer's.
        """

    @abc.abstractmethod
    def shard_variables(self) -> list[Variables]:
        """Returns the per-shard variables of each shard of this worker: name → variable.

        These are the model's non-trainable variables: moving statistics and random states.
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

    def default_all_reduce(self) -> str:
        """Returns the algorithm that "auto" stands for on these devices."""
        return "reduce_to_one"

    def gather_tapes(self) -> list[DeviceTape]:
        """Returns a tape for each group of devices that all-gather tensors within a step."""
        return []

    @property
    def part_shapes(self) -> list[dict[str, tuple[int, ...]]]:
        """For each device, path → shape of the weights that it reads in a step.

        Empty if every device computes with the weights of its own copy.
        """
        return []

    # --- What the training loop uses -----------------------------------------------------------

    def train_steps(self, iterator: BatchIterator, num_steps: int) -> StepTotals:
        """Runs `num_steps` optimizer steps in one compiled call and returns their totals.

        The first call compiles the loop. `num_steps=0` compiles it without training.
        """
        return self.steps.run(iterator, num_steps)

    def train_observed_steps(
        self, iterator: BatchIterator, num_steps: int, observer: Observer
    ) -> StepTotals:
        """Runs the same steps as `train_steps` with another observer.

        The steps are compiled as a separate function; the function of `train_steps` is unchanged.
        `observer` must be the same object in every call.
        """
        previous_observer = self.observer
        self.observer = observer  # Tracing the loop calls the observer.
        try:
            return self._observed_steps.run(iterator, num_steps)
        finally:
            self.observer = previous_observer

    def evaluate(
        self, dataset: tf.data.Dataset, on_batch: Callable[[], None] = lambda: None
    ) -> StepTotals:
        """Returns the totals over every example of `dataset`, each counted once; changes no state.

        Args:
            dataset: global batches; finite.
            on_batch: called after each batch; an exception that it raises ends the evaluation.
        """
        return self._evaluation.totals(dataset, self.states.averaged_statistics(), on_batch)

    def predict(self, images: np.ndarray, *, global_batch_size: int = 1000) -> np.ndarray:
        """Returns the logits of images, in input order; changes no state.

        Args:
            images: uint8 `(N, height, width, channels)`.
            global_batch_size: images per global batch.

        Returns:
            Floats `(N, num_classes)`.
        """
        averages = self.states.averaged_statistics()
        return self._evaluation.logits(images, averages, global_batch_size)

    @functools.cached_property
    def states(self) -> CopyStates:
        """Reads and writes the variables of the copies and shards, after `build`."""
        return CopyStates(self.copies(), self.shard_variables(), self.num_shards, self.workers)

    def state(self) -> State:
        """Returns the state to save, which any other strategy can load."""
        return self.states.averaged()

    def load_state(self, state: State) -> None:
        """Assigns a state to every copy and shard of this worker.

        Arrays are assigned by position; layer names are ignored.

        Raises:
            ValueError: `state` does not have the number and shapes of this model's arrays.
        """
        self.states.load(state)

    # --- The training step on one shard --------------------------------------------------------

    def new_replica(
        self, replica_id: int, device: str, model_fn: ModelFn, optimizer_fn: OptimizerFn
    ) -> Replica:
        """Builds a model and its optimizer, with all variables, on the current device."""
        model, optimizer = model_fn(), optimizer_fn()
        if not optimizer.built:
            optimizer.build(model.trainable_variables)
        return Replica(replica_id, device, model, optimizer, self.new_statistics(model))

    def new_statistics(self, model: keras.Model) -> list[dict[str, keras.Variable]]:
        """Creates the variables of `Replica.statistics` on the current device."""
        if self.shards_per_replica == 1:
            return []
        own = {variable.path: variable for variable in model.non_trainable_variables}
        num_others = self.shards_per_replica - 1
        return [own, *(copies_of(list(own.values())) for _ in range(num_others))]

    def local_gradients(
        self,
        replica: Replica,
        examples: Sequence[tf.Tensor],
        num_global_examples: tf.Tensor,
    ) -> tuple[list[tf.Tensor], StepTotals]:
        """Computes a replica's part of the gradients of the global batch's mean loss.

        A replica with several shards processes them in sequence, so that it needs memory for the
        activations of one shard, and adds their gradients in order.

        Args:
            replica: the replica whose weights are used.
            examples: images `(n_r, height, width, channels)` and labels `(n_r,)`.
            num_global_examples: int scalar, number of examples in the global batch.

        Returns:
            One gradient per trainable variable, and the totals of the examples.
        """
        num, sums, totals = self.shards_per_replica, list[tf.Tensor](), []
        for index in range(num):
            shard = examples
            if num > 1:
                shard_id = replica.replica_id * num + index
                first, _ = self.replica_bounds(num_global_examples, replica.replica_id)
                start, end = self.shard_bounds(num_global_examples, shard_id)
                shard = [tensor[start - first : end - first] for tensor in examples]
            with tf.control_dependencies(sums):
                gradients, shard_totals = self._shard_gradients(
                    replica, index, shard, num_global_examples
                )
            sums = [a + b for a, b in zip(sums, gradients, strict=True)] if sums else gradients
            totals.append(shard_totals)
        return sums, StepTotals.sum(totals)

    def _shard_gradients(
        self,
        replica: Replica,
        index: int,
        shard: Sequence[tf.Tensor],
        num_global_examples: tf.Tensor,
    ) -> tuple[list[tf.Tensor], StepTotals]:
        """Computes gradients and totals of the `index`-th shard of a replica."""
        loss_scale, values = self.loss_scale, replica.values(index)

        def compute(
            images: tf.Tensor, labels: tf.Tensor, num: tf.Tensor
        ) -> tuple[tf.Tensor, tf.Tensor, list[tf.Tensor]]:
            return with_values(
                lambda: self.forward_and_backward(replica, images, labels, num, loss_scale), values
            )

        if self.options.jit_compile:
            compute = tf.function(compute, autograph=False, jit_compile=True)
        images, labels = shard
        logits, loss, gradients = compute(images, labels, num_global_examples)
        shard_id = replica.replica_id * self.shards_per_replica + index
        observed = Shard(images, labels, num_global_examples, logits)
        gradients = self.observer.on_shard(shard_id, observed, loss, gradients)
        return gradients, StepTotals.of(logits, labels)

    def forward_and_backward(
        self,
        replica: Replica,
        images: tf.Tensor,
        labels: tf.Tensor,
        num_global_examples: tf.Tensor,
        loss_scale: tf.Tensor | None,
    ) -> tuple[tf.Tensor, tf.Tensor, list[tf.Tensor]]:
        """Computes the gradients of (sum of a shard's losses) / (examples of the global batch).

        `ManualStrategy` has one of its own, to be read there; `verify` compares the two.

        Args:
            replica: its model has the weights, or `gathered_weights` replaces them.
            images: uint8 `(n, height, width, channels)`, n the size of the shard, which may be 0.
            labels: int32 `(n,)`.
            num_global_examples: int scalar.
            loss_scale: what the backward pass starts from in float16; None for 1.

        Returns:
            The logits `(n, num_classes)`, the loss, and one gradient for each weight.
        """
        with tf.GradientTape() as tape:
            tape.watch(replica.weights)
            logits = replica.model(images, training=True)
            loss_sum = sum_of_losses(logits, labels, self.label_smoothing)
            loss = loss_sum / tf.cast(num_global_examples, tf.float32)
        gradients = tape.gradient(loss, replica.weights, output_gradients=loss_scale)
        return logits, loss, unscaled(gradients, loss_scale)

    def apply_gradients(self, replica: Replica, summed_gradients: list[tf.Tensor]) -> None:
        """Updates the weights of a replica with the gradients summed over all shards."""
        replica.optimizer.apply(summed_gradients, replica.model.trainable_variables)
        self.observer.on_update(replica.replica_id, summed_gradients)

    @property
    def loss_scale(self) -> tf.Tensor | None:
        """The loss scale of this step; None without loss scaling."""
        return loss_scale_of(self.optimizer)

    def loss_and_logits_gradient(
        self, logits: tf.Tensor, labels: tf.Tensor, num_global_examples: tf.Tensor
    ) -> tuple[tf.Tensor, StepTotals, tf.Tensor]:
        """Computes a shard's `loss`, its totals, and the scaled gradient by the logits.

        Strategies whose backward pass spans several devices start it from this gradient, which is
        multiplied by `loss_scale`; `unscaled` divides the results of the backward pass.
        """
        with tf.GradientTape() as tape:
            tape.watch(logits)
            loss_sum = sum_of_losses(logits, labels, self.label_smoothing)
            loss = loss_sum / tf.cast(num_global_examples, tf.float32)
        gradient = tape.gradient(loss, logits, output_gradients=self.loss_scale)
        return loss, StepTotals.of(logits, labels), gradient

    # --- Numbers of examples, shards and devices -----------------------------------------------

    def shard_bounds(self, num_examples: int | tf.Tensor, shard_id: int | tf.Tensor) -> Bounds:
        """Returns the start and end of a shard in a global batch."""
        return weighted_bounds(num_examples, self.shard_weights, shard_id)

    def replica_bounds(self, num_examples: int | tf.Tensor, replica_id: int | tf.Tensor) -> Bounds:
        """Returns the start and end of a replica's part of a global batch."""
        return weighted_bounds(num_examples, self.replica_weights, replica_id)

    @property
    def replica_weights(self) -> list[int]:
        """Relative sizes of the replicas' parts."""
        num, weights = self.shards_per_replica, self.shard_weights
        return [sum(weights[i : i + num]) for i in range(0, len(weights), num)]

    def shard_ids(self, replica_id: int) -> range:
        """Returns the ids of a replica's shards."""
        first = replica_id * self.shards_per_replica
        return range(first, first + self.shards_per_replica)

    @property
    def local_copy_ids(self) -> range:
        """Ids of the copies that this worker holds; all copies for a single worker."""
        return self.workers.local_range(self.num_copies)

    @property
    def local_shard_ids(self) -> range:
        """Ids of the shards that this worker trains on; all shards for a single worker."""
        return self.workers.local_range(self.num_shards)

    @property
    def local_devices(self) -> list[str]:
        """The devices of this worker."""
        return [self.devices[i] for i in self.workers.local_range(self.num_devices)]

    @property
    def local_replica_devices(self) -> list[str]:
        """The first device of each replica of this worker."""
        return self.local_devices[:: self.devices_per_replica]

    def gradient_buckets(self, tensors: Sequence[tf.Tensor]) -> GradientBuckets:
        """Returns the all-reduce buckets for a replica's tensors."""
        dtype = self.options.communication_dtype
        return GradientBuckets(
            tensors,
            bucket_bytes=round(self.bucket_mib * 2**20),
            dtype=None if dtype == "float32" else dtype,
        )
