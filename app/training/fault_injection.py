"""Injects faults into a training, to test which check detects them.

Each fault occurs in real distributed programs. It is injected through the observer of a strategy,
in place of one of the strategy's functions, or through the dataset.
"""

import time
from collections.abc import Callable, Collection, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from app.options.fault import Fault
from app.runtime.errors import ConfigError
from strategies.base import Strategy
from strategies.collectives import shard_bounds
from strategies.device_tape import DeviceTape
from strategies.observer import Observer, Shard
from strategies.parts import WholeVariable
from strategies.tf_private import flatten_layers

Batch = tuple[tf.Tensor, tf.Tensor]  # Images and labels.

_PERTURBATION = 1e-3


class FaultyObserver(Observer):
    """Injects a fault into the steps of a strategy.

    Args:
        fault: the fault.
        strategy: a built strategy.
    """

    def __init__(self, fault: Fault, strategy: Strategy):
        self._fault, self._strategy = fault, strategy
        local_ids, copy_id = strategy.local_copy_ids, fault.parameters.get("replica", 0)
        self._is_here = copy_id in local_ids
        faulty_copy = strategy.copies()[int(copy_id) - local_ids.start if self._is_here else 0]
        self._step = _first_part(faulty_copy["optimizer/iteration"])
        self._first_weight = _first_part(
            next(faulty_copy[f"model/{v.path}"] for v in strategy.model.variables if v.trainable)
        )
        self._replace_functions()

    def begin(self) -> None:
        """Injects a fault that exists before the first step; called after the state is loaded."""
        is_first = int(self._step.numpy()) == 0 == self._fault.parameters.get("step")
        if self._fault.name == "perturb_weight" and self._is_here and is_first:
            self._perturb_weight()
        if self._fault.name == "stale_stage":
            self._make_stale(int(self._fault.parameters["stage"]))
        if self._fault.name == "unsynced_batch_norm":
            self._strategy.syncs_batch_norm = False
            for layer in flatten_layers(self._strategy.model):
                if isinstance(layer, keras.layers.BatchNormalization):
                    layer.synchronized = False  # In `mirrored`, Keras synchronises.

    def batches(
        self, create_dataset: Callable[[int], tf.data.Dataset], seed: int
    ) -> tf.data.Dataset:
        """Returns the training dataset with the fault injected, if it is a fault of the data.

        Args:
            create_dataset: creates the dataset of global batches with the order for a seed.
            seed: seed of the training.
        """
        dataset = create_dataset(seed)
        if self._fault.name == "same_shard":
            return dataset.map(self._repeat_first_shard)
        if self._fault.name == "shuffle_order":
            both = tf.data.Dataset.zip(dataset, create_dataset(seed + 1))
            return both.map(self._take_one_part_from)
        return dataset

    @tf.autograph.experimental.do_not_convert
    def _repeat_first_shard(self, images: tf.Tensor, labels: tf.Tensor) -> Batch:
        """Returns a batch with the examples of the first shard in each shard."""
        shards = range(self._strategy.num_shards)
        bounds = [self._strategy.shard_bounds(tf.size(labels), s) for s in shards]
        first = bounds[0][1]  # A larger shard repeats the examples.
        rows = tf.concat([tf.range(end - start) % first for start, end in bounds], axis=0)
        return tf.gather(images, rows), tf.gather(labels, rows)

    @tf.autograph.experimental.do_not_convert
    def _take_one_part_from(self, right: Batch, wrong: Batch) -> tuple[tf.Tensor, ...]:
        """Returns a batch in which the part of one replica is that of another batch."""
        num_examples, num = tf.size(right[1]), self._strategy.shards_per_replica
        first = int(self._fault.parameters["replica"]) * num
        start, _ = self._strategy.shard_bounds(num_examples, first)
        _, end = self._strategy.shard_bounds(num_examples, first + num - 1)
        return tuple(
            tf.concat([a[:start], b[start:end], a[end:]], axis=0)
            for a, b in zip(right, wrong, strict=True)
        )

    def on_shard(
        self, shard_id: int | tf.Tensor, shard: Shard, loss: tf.Tensor, gradients: list[tf.Tensor]
    ) -> list[tf.Tensor]:
        """Returns the gradients that the replica sends instead of its own."""
        sent = self._sent(shard_id, shard, gradients)
        first = self._fault.parameters.get("step")
        if sent is gradients or not first:
            return sent
        has_begun = tf.cast(self._step, tf.int64) + 1 >= int(first)
        return [tf.where(has_begun, a, b) for a, b in zip(sent, gradients, strict=True)]

    def _sent(
        self, shard_id: int | tf.Tensor, shard: Shard, gradients: list[tf.Tensor]
    ) -> list[tf.Tensor]:
        """Returns the gradients that the replica sends after the start of the fault."""
        fault, parameters = self._fault.name, self._fault.parameters
        num_parts, num_shards = self._strategy.shards_per_replica, self._strategy.num_shards
        if fault in ("drop_gradient", "lost_micro_batch"):
            is_replica = fault == "drop_gradient"
            own_id = shard_id // num_parts if is_replica else shard_id % num_parts
            lost = tf.equal(own_id, parameters["replica" if is_replica else "micro_batch"])
            return [tf.where(lost, tf.zeros_like(g), g) for g in gradients]
        if fault == "scale_gradient":
            return [g * tf.cast(parameters["factor"], g.dtype) for g in gradients]
        if fault == "divided_twice":
            return [g / tf.cast(num_parts, g.dtype) for g in gradients]
        if fault == "mean_of_means":  # Divide each shard's sum by its own size, then average.
            share = shard.num_global_examples / (tf.size(shard.labels) * num_shards)
            return [g * tf.cast(share, g.dtype) for g in gradients]
        if fault == "bf16_all_reduce":
            return [tf.cast(tf.cast(g, tf.bfloat16), g.dtype) for g in gradients]
        if fault == "slow_replica":
            return self._delayed(shard_id, gradients)
        return gradients

    def on_update(self, copy_id: int | tf.Tensor, summed_gradients: list[tf.Tensor]) -> None:
        """Changes a weight of one copy after a step, like a defective memory chip."""
        if self._fault.name != "perturb_weight" or not self._is_here:
            return
        replica, step = (int(self._fault.parameters[name]) for name in ("replica", "step"))
        if isinstance(copy_id, int) and copy_id != replica:
            return
        is_copy, is_step = tf.equal(copy_id, replica), tf.equal(tf.cast(self._step, tf.int64), step)
        tf.cond(is_copy & is_step, self._perturb_weight, lambda: False)

    def _replace_functions(self) -> None:
        """Replaces the functions of the strategy that the fault changes."""
        strategy: Any = self._strategy
        if self._fault.name == "local_batch_norm":
            strategy.states.average = lambda arrays: arrays[0]
        if self._fault.name == "forgotten_backward_sum":
            strategy.new_tape = _OwnTermTape
        if self._fault.name == "repeated_bias":
            read_weights = strategy.read_weights

            def read_repeated(replica_id: int) -> list[dict[str, tf.Tensor]]:
                parts, devices = read_weights(replica_id), strategy.replica_devices[replica_id]
                for named, device in zip(parts, devices, strict=True):
                    with tf.device(device):
                        for path in [path for path in named if path.endswith("bias")]:
                            named[path] *= strategy.devices_per_replica
                return parts

            strategy.read_weights = read_repeated
        if self._fault.name == "wrong_shard":
            gather_weights = strategy.gather_weights

            def gather_exchanged() -> list[list[tf.Tensor]]:
                exchanged = []
                for weights, device in zip(gather_weights(), strategy.devices, strict=True):
                    with tf.device(device):
                        exchanged.append([self._exchanged(tensor) for tensor in weights])
                return exchanged

            strategy.gather_weights = gather_exchanged

    def _make_stale(self, stage: int) -> None:
        """Lets a stage of each pipeline compute with its weights of the step before."""
        strategy: Any = self._strategy
        read_weights, kept = strategy.read_weights, []
        for parts in strategy.parts:
            with tf.device(parts[stage].device):
                weights = parts[stage].weights.items()
                kept.append({path: tf.Variable(weight.value) for path, weight in weights})

        def read_stale(replica_id: int) -> list[dict[str, tf.Tensor]]:
            weights = read_weights(replica_id)
            older = {}
            with tf.device(strategy.parts[replica_id][stage].device):
                for path, variable in kept[replica_id].items():
                    older[path] = tf.identity(variable)
                    with tf.control_dependencies([older[path]]):
                        variable.assign(weights[stage][path])
            return [*weights[:stage], older, *weights[stage + 1 :]]

        strategy.read_weights = read_stale

    def _exchanged(self, tensor: tf.Tensor) -> tf.Tensor:
        """Swaps the ranges of elements of devices 0 and 1."""
        flat, num_replicas = tf.reshape(tensor, [-1]), self._strategy.num_replicas
        first, second, *others = (
            flat[slice(*shard_bounds(flat.shape[0], num_replicas, r))] for r in range(num_replicas)
        )
        return tf.reshape(tf.concat([second, first, *others], axis=0), tensor.shape)

    def _perturb_weight(self) -> bool:
        """Changes the first element of the first weight of the faulty copy."""
        change = np.zeros(self._first_weight.shape, self._first_weight.dtype.as_numpy_dtype)
        change.flat[0] = _PERTURBATION
        self._first_weight.assign_add(change)
        return True

    def _delayed(self, shard_id: int | tf.Tensor, gradients: list[tf.Tensor]) -> list[tf.Tensor]:
        last = (self._fault.parameters["replica"] + 1) * self._strategy.shards_per_replica - 1

        def wait(shard_id: np.ndarray) -> None:
            if shard_id == last:
                time.sleep(self._fault.parameters["ms"] / 1000)

        with tf.control_dependencies(gradients):
            waited = tf.numpy_function(wait, [shard_id], [])
        with tf.control_dependencies([waited]):
            return [tf.identity(g) for g in gradients]


class _OwnTermTape(DeviceTape):
    """Forgets the sum in the backward pass of a gather: each device keeps its own term."""

    def sum_parts(
        self, gradients: Sequence[tf.Tensor], sizes: Sequence[int], senders: Sequence[str]
    ) -> list[tf.Tensor]:
        """Returns to each device its part of its own gradient."""
        if len(senders) == 1:
            return super().sum_parts(gradients, sizes, senders)
        parts = []
        for d, device in enumerate(senders):
            with tf.device(device):
                parts.append(tf.split(gradients[d], sizes, axis=-1)[d])
        return parts


def _first_part(variable: Any) -> tf.Variable:
    """Returns a variable; for one that is split or copied over devices, its first part or copy."""
    return variable.parts[0] if isinstance(variable, WholeVariable) else variable


def inject_fault(
    fault: Fault, strategy: Strategy, *, batch_sizes: Collection[int], num_steps: int
) -> FaultyObserver:
    """Injects a fault into a built strategy that has not run a step.

    Args:
        fault: the fault.
        strategy: its observer is replaced.
        batch_sizes: all sizes of global batches.
        num_steps: number of steps of the training.

    Returns:
        The strategy's new observer, whose `begin` must be called before the first step, and which
        makes the dataset.

    Raises:
        ConfigError: the fault has no effect on this training.
    """
    _check_can_happen(fault, strategy, batch_sizes)
    if fault.parameters.get("step", 0) > num_steps:
        raise ConfigError(
            f"--inject={fault}: the training has only {num_steps} steps; use step={num_steps}"
            " or less"
        )
    strategy.observer = observer = FaultyObserver(fault, strategy)
    return observer


def _check_can_happen(fault: Fault, strategy: Strategy, batch_sizes: Collection[int]) -> None:
    """Checks that a fault has an effect on a strategy.

    Raises:
        ConfigError: it has none.
    """
    fault.check(strategy.name, strategy)
    if fault.name == "mean_of_means" and not any(
        len(set(_shard_sizes(strategy, n))) > 1 for n in batch_sizes
    ):
        sizes = " and ".join(map(str, sorted(batch_sizes, reverse=True)))
        raise ConfigError(
            f"--inject={fault} changes nothing with batches of {sizes} in {strategy.num_shards}"
            f" equal shards; use --global_batch_size={max(batch_sizes) + 1}"
        )
    if fault.name == "local_batch_norm" and not strategy.states.statistics_names:
        raise ConfigError(f"--inject={fault} needs a model with BatchNorm; use --model=resnet18")
    syncs = strategy.syncs_batch_norm
    if fault.name == "local_batch_norm" and syncs:
        raise ConfigError(
            f"--inject={fault} needs statistics that differ between replicas, got"
            " --batch_norm=sync; use --batch_norm=average"
        )
    if fault.name == "unsynced_batch_norm" and not syncs:
        raise ConfigError(
            f"--inject={fault} needs statistics of the whole batch; use --batch_norm=sync"
            " --model=resnet18"
        )


def _shard_sizes(strategy: Strategy, num_examples: int) -> list[int]:
    bounds = [strategy.shard_bounds(num_examples, s) for s in range(strategy.num_shards)]
    return [end - start for start, end in bounds]
