"""Fault injection: makes a training wrong on purpose, to see what detects it, and how.

Each fault is one that data-parallel programs really have. It is injected through the observer of a
strategy or through the data set: no strategy knows of it.
"""

import time
from collections.abc import Callable, Collection, Mapping, Sequence

import numpy as np
import tensorflow as tf

from app.config.fault import Fault
from app.runtime.errors import ConfigError
from strategies.base import Strategy
from strategies.collectives import shard_bounds
from strategies.observer import Observer, Shard

Batch = tuple[tf.Tensor, tf.Tensor]  # Images and labels.

_PERTURBATION = 1e-3


class FaultyObserver(Observer):
    """Injects a fault into the steps of a strategy.

    Args:
        fault: to inject; faults of the data set are those of `inject_data_fault`.
        strategy: built.
    """

    def __init__(self, fault: Fault, strategy: Strategy):
        self._fault, self._num_shards = fault, strategy.num_shards
        local_ids, copy_id = strategy.local_copy_ids, fault.parameters.get("replica", 0)
        self._is_here = copy_id in local_ids
        faulty_copy = strategy.copies()[int(copy_id) - local_ids.start if self._is_here else 0]
        self._step = faulty_copy["optimizer/iteration"]
        self._first_weight = next(
            faulty_copy[f"model/{v.path}"] for v in strategy.model.variables if v.trainable
        )

    def begin(self) -> None:
        """Injects a fault that is there before the first step, once the state is loaded."""
        is_first = int(self._step.numpy()) == 0 == self._fault.parameters.get("step")
        if self._fault.name == "perturb_weight" and self._is_here and is_first:
            self._perturb_weight()

    def on_shard(
        self, shard_id: int | tf.Tensor, shard: Shard, loss: tf.Tensor, gradients: list[tf.Tensor]
    ) -> list[tf.Tensor]:
        """Returns the gradients that the replica sends in place of its own."""
        fault, parameters = self._fault.name, self._fault.parameters
        if fault == "drop_gradient":
            lost = tf.equal(shard_id, parameters["replica"])
            return [tf.where(lost, tf.zeros_like(g), g) for g in gradients]
        if fault == "scale_gradient":
            return [g * tf.cast(parameters["factor"], g.dtype) for g in gradients]
        if fault == "mean_of_means":  # Each shard's sum over its own size, then the mean of those.
            share = shard.num_global_examples / (tf.size(shard.labels) * self._num_shards)
            return [g * tf.cast(share, g.dtype) for g in gradients]
        if fault == "bf16_all_reduce":
            return [tf.cast(tf.cast(g, tf.bfloat16), g.dtype) for g in gradients]
        if fault == "slow_replica":
            return self._delayed(shard_id, gradients)
        return gradients

    def on_update(self, copy_id: int | tf.Tensor, summed_gradients: list[tf.Tensor]) -> None:
        """Changes a weight of one copy after a step, as a bad memory chip would."""
        if self._fault.name != "perturb_weight" or not self._is_here:
            return
        replica, step = (int(self._fault.parameters[name]) for name in ("replica", "step"))
        if isinstance(copy_id, int) and copy_id != replica:
            return
        is_copy, is_step = tf.equal(copy_id, replica), tf.equal(tf.cast(self._step, tf.int64), step)
        tf.cond(is_copy & is_step, self._perturb_weight, lambda: False)

    def on_average(
        self,
        per_shard_statistics: Sequence[Sequence[np.ndarray]],
        averages: Mapping[str, np.ndarray],
    ) -> Mapping[str, np.ndarray]:
        """Returns the statistics of shard 0 in place of the averages."""
        if self._fault.name == "local_batch_norm":
            return dict(zip(averages, per_shard_statistics[0], strict=True))
        return averages

    def _perturb_weight(self) -> bool:
        """Changes the first element of the first weight of the faulty copy."""
        change = np.zeros(self._first_weight.shape, self._first_weight.dtype.as_numpy_dtype)
        change.flat[0] = _PERTURBATION
        self._first_weight.assign_add(change)
        return True

    def _delayed(self, shard_id: int | tf.Tensor, gradients: list[tf.Tensor]) -> list[tf.Tensor]:
        def wait(shard_id: np.ndarray) -> None:
            if shard_id == self._fault.parameters["replica"]:
                time.sleep(self._fault.parameters["ms"] / 1000)

        with tf.control_dependencies(gradients):
            waited = tf.numpy_function(wait, [shard_id], [])
        with tf.control_dependencies([waited]):
            return [tf.identity(g) for g in gradients]


def inject_fault(
    fault: Fault, strategy: Strategy, *, batch_sizes: Collection[int], num_steps: int
) -> FaultyObserver:
    """Injects a fault into a strategy that is built and has made no step.

    Args:
        fault: to inject; for those of the data set, see `inject_data_fault`.
        strategy: its observer is replaced.
        batch_sizes: all sizes that a global batch will have.
        num_steps: how many steps will be made.

    Returns:
        The new observer of the strategy, whose `begin` is to be called before the first step.

    Raises:
        ConfigError: the fault cannot happen here.
    """
    of_copies = fault.name == "perturb_weight"
    fault.check_replicas(strategy.num_copies if of_copies else strategy.num_shards)
    if fault.name == "mean_of_means" and not any(n % strategy.num_shards for n in batch_sizes):
        sizes = " and ".join(map(str, sorted(batch_sizes, reverse=True)))
        raise ConfigError(
            f"--inject={fault} with batches of {sizes} on {strategy.num_shards} replicas — shards"
            " of different sizes are required, or the mean of means is the mean; use"
            f" --global_batch_size={max(batch_sizes) + 1}"
        )
    if fault.parameters.get("step", 0) > num_steps:
        raise ConfigError(
            f"--inject={fault} in a training of {num_steps} steps — a step that is made is"
            f" required; use step={num_steps} or less"
        )
    if fault.name == "local_batch_norm" and not strategy.statistics_names:
        raise ConfigError(
            f"--inject={fault} with a model without BatchNorm — moving statistics are required;"
            " use --model=resnet18"
        )
    strategy.observer = observer = FaultyObserver(fault, strategy)
    return observer


def inject_data_fault(
    fault: Fault,
    create_dataset: Callable[[int], tf.data.Dataset],
    *,
    seed: int,
    num_shards: int,
) -> tf.data.Dataset:
    """Returns the training set with the fault injected, where it is one of the data.

    Args:
        fault: to inject.
        create_dataset: creates the set of global batches whose order follows from a seed.
        seed: of the training.
        num_shards: of each global batch.
    """
    dataset = create_dataset(seed)
    if fault.name == "same_shard":

        def repeat_first_shard(images: tf.Tensor, labels: tf.Tensor) -> Batch:
            bounds = [shard_bounds(tf.size(labels), num_shards, r) for r in range(num_shards)]
            rows = tf.concat([tf.range(end - start) for start, end in bounds], axis=0)
            return tf.gather(images, rows), tf.gather(labels, rows)

        return dataset.map(repeat_first_shard)
    if fault.name == "shuffle_order":

        def take_one_shard_from(right: Batch, wrong: Batch) -> tuple[tf.Tensor, ...]:
            replica = int(fault.parameters["replica"])
            start, end = shard_bounds(tf.size(right[1]), num_shards, replica)
            return tuple(
                tf.concat([a[:start], b[start:end], a[end:]], axis=0)
                for a, b in zip(right, wrong, strict=True)
            )

        return tf.data.Dataset.zip(dataset, create_dataset(seed + 1)).map(take_one_shard_from)
    return dataset
