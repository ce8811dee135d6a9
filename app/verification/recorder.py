"""Records the steps of a training with any strategy."""

import functools
import pathlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Protocol, TypeVar

import keras
import numpy as np
import tensorflow as tf

from app.runtime.errors import ConfigError, DivergedError
from app.verification.split import KINDS_OF_A_SHARD, Split
from app.verification.straggler import SendTime
from app.verification.trace import PARTS, TraceWriter, hash_examples
from strategies.base import Strategy
from strategies.copies import State
from strategies.loss_scale import loss_scale_of
from strategies.observer import Observer, Shard

T = TypeVar("T")
Check = Callable[[int, str, list[dict[str, np.ndarray]]], None]


class StepArrays(Protocol):
    """The interface that receives the arrays of a step; see `TraceWriter.write`."""

    def write(self, step: int, kind: str, per_replica: Sequence[Mapping[str, np.ndarray]]) -> None:
        """Receives arrays of all replicas, or shards, of this worker."""


class StepRecorder(Observer):
    """Observes the steps of a strategy and writes the arrays of the last step.

    Args:
        strategy: a built strategy.
        inner: a second observer, which may inject a fault: a replica's results are kept before it,
            the sums after it.
    """

    def __init__(self, strategy: Strategy, inner: Observer | None = None):
        self._strategy, self._inner = strategy, inner or Observer()
        self._kept: dict[tuple[str, int], list[np.ndarray]] = {}
        self._sent: dict[int, SendTime] = {}
        self._parts: dict[int, dict[str, np.ndarray]] = {}  # Shapes of a device's parts.
        self._trainable = [variable.path for variable in strategy.model.trainable_variables]

    def write_step(self, trace: StepArrays, step: int, check: Check) -> None:
        """Writes the results of the last step, and the state after it.

        Args:
            trace: receives the arrays.
            step: number of the step.
            check: called with step, kind and arrays of each item before they are written.
        """
        shards = self._take("shard")
        check(step, "loss", [{"loss": loss} for *_, loss in shards])
        trace.write(
            step,
            "examples",
            [{"examples": hash_examples(images, labels)} for images, labels, _ in shards],
        )
        trace.write(step, "loss", [{"loss": loss} for *_, loss in shards])
        for kind in ("gradients", "sums"):
            per_replica = [
                dict(zip(self._trainable, arrays, strict=True)) for arrays in self._take(kind)
            ]
            check(step, kind, per_replica)
            trace.write(step, kind, per_replica)
        self.write_states(trace, step, check)

    def write_states(self, trace: StepArrays, step: int, check: Check) -> None:
        """Writes the current weights, optimizer state and BatchNorm statistics.

        Args:
            trace: receives the arrays.
            step: number of the last step.
            check: see `write_step`.
        """
        strategy = self._strategy
        states = strategy.copy_states()
        check(step, "state", states)
        for kind in ("slots", "weights"):
            trace.write(step, kind, [_part(state, kind, strategy) for state in states])
        own = [
            {name: v.numpy() for name, v in shard.items()} for shard in strategy.shard_statistics()
        ]
        trace.write(step, "own statistics", [_without_prefix(arrays) for arrays in own])
        trace.write(step, "statistics", [_without_prefix(strategy.averaged_statistics())])

    def write_parts(self, trace: StepArrays, step: int) -> None:
        """Writes the shapes of the parts of the weights, if devices hold parts."""
        if self._parts:
            trace.write(step, PARTS, [self._parts[d] for d in sorted(self._parts)])

    def take_times(self) -> list[SendTime]:
        """Returns when this worker's replicas sent their gradients in the last step."""
        taken, self._sent = self._sent, {}
        times, num = self._in_order("times", taken), self._strategy.shards_per_replica
        return [max(times[i : i + num]) for i in range(0, len(times), num)]

    def on_shard(
        self, shard_id: int | tf.Tensor, shard: Shard, loss: tf.Tensor, gradients: list[tf.Tensor]
    ) -> list[tf.Tensor]:
        """Keeps examples, loss and gradients, and the time at which they were sent."""
        self._keep("shard", shard_id, [shard.images, shard.labels, loss])
        self._keep("gradients", shard_id, gradients)
        sent = self._inner.on_shard(shard_id, shard, loss, gradients)
        with tf.control_dependencies(sent):
            tf.numpy_function(self._keep_time, [shard_id], [])
        return sent

    def on_update(self, copy_id: int | tf.Tensor, summed_gradients: list[tf.Tensor]) -> None:
        """Keeps the sums."""
        self._keep("sums", copy_id, summed_gradients)
        self._inner.on_update(copy_id, summed_gradients)

    def on_weights(
        self, device_id: int, weights: Mapping[str, tf.Tensor]
    ) -> Mapping[str, tf.Tensor]:
        """Keeps the shapes of the weights that a device uses."""
        self._parts[device_id] = {
            path: np.array(tensor.shape, np.int64) for path, tensor in weights.items()
        }
        return self._inner.on_weights(device_id, weights)

    def on_pieces(self, device_id: int, pieces: list[tf.Tensor]) -> list[tf.Tensor]:
        """Returns the terms of the inner observer."""
        return self._inner.on_pieces(device_id, pieces)

    def on_average(
        self,
        per_shard_statistics: Sequence[Sequence[np.ndarray]],
        averages: Mapping[str, np.ndarray],
    ) -> Mapping[str, np.ndarray]:
        """Returns the averages of the inner observer."""
        return self._inner.on_average(per_shard_statistics, averages)

    def _keep(self, what: str, item_id: int | tf.Tensor, tensors: Sequence[tf.Tensor]) -> None:
        """Keeps tensors of a shard or a copy once they are computed."""

        def keep(item_id: np.ndarray, *arrays: np.ndarray) -> None:
            self._kept[what, int(item_id)] = [np.array(array) for array in arrays]

        tf.numpy_function(keep, [item_id, *tensors], [])

    def _keep_time(self, shard_id: np.ndarray) -> None:
        self._sent[int(shard_id)] = time.monotonic(), time.process_time()

    def _take(self, what: str) -> list[list[np.ndarray]]:
        """Returns the arrays kept under a name in the last step, one list per item."""
        taken = {i: self._kept.pop((kind, i)) for kind, i in list(self._kept) if kind == what}
        return self._in_order(what, taken)

    def _in_order(self, what: str, taken: dict[int, T]) -> list[T]:
        """Returns the kept values of this worker's shards, or copies, in order."""
        strategy, of_copies = self._strategy, what == "sums"
        ids = strategy.local_copy_ids if of_copies else strategy.local_shard_ids
        if set(taken) != set(ids):
            found = ", ".join(map(str, sorted(taken))) or "none"
            items, method = (
                ("copies", "apply_gradients") if of_copies else ("shards", "local_gradients")
            )
            raise ConfigError(
                f"strategy {strategy.name} reported the {what} of {items} {found} instead of"
                f" {', '.join(map(str, ids))}; its train_step must call self.{method} for each, see"
                " docs/extend.md"
            )
        return [taken[item_id] for item_id in ids]


class Recorder(StepRecorder):
    """Records a training from its first step, in a directory.

    Args:
        strategy: a built strategy that has not run a step; this object replaces its observer.
        inner: see `StepRecorder`.

    Attributes:
        skipped_steps: steps that the optimizer skipped because a gradient overflowed.
    """

    def __init__(self, strategy: Strategy, inner: Observer | None = None):
        super().__init__(strategy, inner)
        strategy.observer = self
        self.skipped_steps: list[int] = []

    def record(
        self,
        iterator: Iterator,
        *,
        num_steps: int,
        path: pathlib.Path,
        on_step: Callable[[int], None] = lambda step: None,
    ) -> list[list[SendTime]]:
        """Trains `num_steps` steps and writes their trace to `path`.

        Args:
            iterator: the result of `strategy.distribute`.
            num_steps: number of steps.
            path: directory of the trace.
            on_step: called after each step.

        Returns:
            For each step and replica, the time at which it sent its last gradient.

        Raises:
            ConfigError: steps of this strategy, or of this model, cannot be checked.
            DivergedError: a computed value is not finite.
            DiskFullError: no space for the trace.
        """
        strategy = self._strategy
        check_repeatable(strategy.model)
        check = functools.partial(_check_finite, strategy)
        times = []
        num_replicas = strategy.num_replicas // strategy.workers.count
        with TraceWriter(path, num_replicas) as trace:
            self.write_states(trace, 0, check)
            for step in range(1, num_steps + 1):
                start, busy = time.monotonic(), time.process_time()
                scale = loss_scale_of(strategy.optimizer)
                strategy.train_steps(iterator, 1)
                if scale is not None and loss_scale_of(strategy.optimizer) < scale:
                    self.skipped_steps.append(step)
                if step == 1:
                    self.write_parts(trace, step)
                self.write_step(trace, step, check)
                times.append([(sent - start, cpu - busy) for sent, cpu in self.take_times()])
                on_step(step)
        return times


def _check_finite(
    strategy: Strategy, step: int, kind: str, per_item: list[dict[str, np.ndarray]]
) -> None:
    split = Split.of(strategy)
    if kind in ("gradients", "sums") and loss_scale_of(strategy.optimizer) is not None:
        return  # The step is skipped.
    of_shards = kind in KINDS_OF_A_SHARD
    item_ids = strategy.local_shard_ids if of_shards else strategy.local_copy_ids
    for item_id, arrays in zip(item_ids, per_item, strict=True):
        for tensor, array in arrays.items():
            if not np.isfinite(array).all():
                raise DivergedError(
                    f"{kind} of {tensor} on {split.name_items(kind, [item_id])} is not finite at"
                    f" step {step}; use a smaller --learning_rate, or fewer --steps"
                )


def check_repeatable(model: keras.Model) -> None:
    """Checks that a step is a function of only weights and examples.

    Raises:
        ConfigError: a layer draws random numbers in training.
    """
    seeds = [v.path for v in model.variables if not np.issubdtype(np.dtype(v.dtype), np.floating)]
    if seeds:
        raise ConfigError(
            f"model {model.name} draws random numbers in training ({seeds[0]}), so a step"
            " cannot be repeated; leave out layers such as Dropout"
        )


def _part(state: State, kind: str, strategy: Strategy) -> State:
    """Returns the weights, or the optimizer state ("slots"), of a copy."""
    if kind == "slots":
        names = [name for name in state if name.startswith("optimizer/")]
    else:
        names = [f"model/{variable.path}" for variable in strategy.model.trainable_variables]
    return _without_prefix({name: state[name] for name in names})


def _without_prefix(arrays: State) -> State:
    return {name.partition("/")[2]: array for name, array in arrays.items()}
