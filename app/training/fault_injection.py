"""The fault lab: spoils a training on purpose, so that one can see what finds it, and how.

Each fault is one that data-parallel programs really have. It is put around a strategy from outside:
no strategy knows of it.
"""

import time
from collections.abc import Callable, Collection

import numpy as np
import tensorflow as tf

from app.config.fault import Fault
from app.runtime.errors import ConfigError
from strategies.base import BatchIterator, StepTotals, Strategy
from strategies.collectives import shard_bounds
from strategies.observer import Observer, Shard

Batch = tuple[tf.Tensor, tf.Tensor]  # Images and labels.

_PERTURBATION = 1e-3


class FaultyObserver(Observer):
    """Spoils what a replica sends.

    Args:
        fault: what to do.
        num_replicas: R.
    """

    def __init__(self, fault: Fault, num_replicas: int):
        self._fault, self._num_replicas = fault, num_replicas

    def before_all_reduce(
        self, replica_id: int | tf.Tensor, shard: Shard, loss: tf.Tensor, gradients: list[tf.Tensor]
    ) -> list[tf.Tensor]:
        """Returns the gradients that the replica sends in place of its own."""
        fault, parameters = self._fault.name, self._fault.parameters
        if fault == "drop_gradient":
            lost = tf.equal(replica_id, parameters["replica"])
            return [tf.where(lost, tf.zeros_like(g), g) for g in gradients]
        if fault == "scale_gradient":
            return [g * tf.cast(parameters["factor"], g.dtype) for g in gradients]
        if fault == "mean_of_means":  # Each shard's sum over its own size, then the mean of those.
            share = shard.num_global_examples / (tf.size(shard.labels) * self._num_replicas)
            return [g * tf.cast(share, g.dtype) for g in gradients]
        if fault == "bf16_all_reduce":
            return [tf.cast(tf.cast(g, tf.bfloat16), g.dtype) for g in gradients]
        if fault == "slow_replica":
            return self._delayed(replica_id, gradients)
        return gradients

    def _delayed(self, replica_id: int | tf.Tensor, gradients: list[tf.Tensor]) -> list[tf.Tensor]:
        def wait(replica_id: np.ndarray) -> None:
            if replica_id == self._fault.parameters["replica"]:
                time.sleep(self._fault.parameters["ms"] / 1000)

        with tf.control_dependencies(gradients):
            waited = tf.numpy_function(wait, [replica_id], [])
        with tf.control_dependencies([waited]):
            return [tf.identity(g) for g in gradients]


def inject_fault(
    fault: Fault, strategy: Strategy, *, batch_sizes: Collection[int], num_steps: int
) -> Observer:
    """Spoils a strategy that is built and has made no step.

    Args:
        fault: what to do; what concerns the data is `inject_data_fault`'s.
        strategy: to be spoiled.
        batch_sizes: all sizes that a global batch will have.
        num_steps: how many steps will be made.

    Returns:
        What looks on at its steps; it is in place already.

    Raises:
        ConfigError: the fault cannot happen here.
    """
    fault.check_replicas(strategy.num_replicas)
    if fault.name == "mean_of_means" and not any(n % strategy.num_replicas for n in batch_sizes):
        sizes = " and ".join(map(str, sorted(batch_sizes, reverse=True)))
        raise ConfigError(
            f"--inject={fault} with batches of {sizes} on {strategy.num_replicas} replicas — shards"
            " of different sizes are required, or the mean of means is the mean; use"
            f" --global_batch_size={max(batch_sizes) + 1}"
        )
    if fault.parameters.get("step", 0) > num_steps:
        raise ConfigError(
            f"--inject={fault} in a training of {num_steps} steps — a step that is made is"
            f" required; use step={num_steps} or less"
        )
    if fault.name == "perturb_weight":
        replica, step = (int(fault.parameters[name]) for name in ("replica", "step"))
        _perturb_weight(strategy, replica=replica, step=step)
    elif fault.name == "local_batch_norm":
        if not any("moving_" in name for name in strategy.variable_names):
            raise ConfigError(
                f"--inject={fault} with a model without BatchNorm — moving statistics are required;"
                " use --model=resnet18"
            )
        # From outside, as any fault: the strategy itself has no place for it.
        strategy.average_moving_statistics = lambda: None  # type: ignore[method-assign]
    strategy.observer = FaultyObserver(fault, strategy.num_replicas)
    return strategy.observer


def inject_data_fault(
    fault: Fault,
    create_dataset: Callable[[int], tf.data.Dataset],
    *,
    seed: int,
    num_replicas: int,
) -> tf.data.Dataset:
    """Returns the training set with what is wrong with it.

    Args:
        fault: what to do.
        create_dataset: makes the set of global batches whose order follows from a seed.
        seed: the right one.
        num_replicas: R, into as many shards a batch is cut.
    """
    dataset = create_dataset(seed)
    if fault.name == "same_shard":

        def repeat_first_shard(images: tf.Tensor, labels: tf.Tensor) -> Batch:
            bounds = [shard_bounds(tf.size(labels), num_replicas, r) for r in range(num_replicas)]
            rows = tf.concat([tf.range(end - start) for start, end in bounds], axis=0)
            return tf.gather(images, rows), tf.gather(labels, rows)

        return dataset.map(repeat_first_shard)
    if fault.name == "shuffle_order":

        def take_one_shard_from(right: Batch, wrong: Batch) -> tuple[tf.Tensor, ...]:
            replica = int(fault.parameters["replica"])
            start, end = shard_bounds(tf.size(right[1]), num_replicas, replica)
            return tuple(
                tf.concat([a[:start], b[start:end], a[end:]], axis=0)
                for a, b in zip(right, wrong, strict=True)
            )

        return tf.data.Dataset.zip(dataset, create_dataset(seed + 1)).map(take_one_shard_from)
    return dataset


def _perturb_weight(strategy: Strategy, *, replica: int, step: int) -> None:
    """Lets the first weight of a replica change after a step, as a bad memory chip would."""
    make_steps = strategy.train_steps

    def change() -> None:
        if replica not in strategy.local_replica_ids:
            return
        position = replica - strategy.local_replica_ids.start
        weight = strategy.replica_variables()[position][_first_trainable(strategy)]
        flat = weight.numpy().ravel()
        flat[0] += _PERTURBATION
        weight.assign(flat.reshape(weight.shape))

    def train_steps(iterator: BatchIterator, num_steps: int) -> StepTotals:
        until = step - int(strategy.optimizer.iterations.numpy())
        if not 0 < until <= num_steps:
            return make_steps(iterator, num_steps)
        totals = make_steps(iterator, until)
        change()
        return StepTotals.sum([totals, make_steps(iterator, num_steps - until)])

    # From outside, as any fault: the strategy itself has no place for it.
    strategy.train_steps = train_steps  # type: ignore[method-assign]
    if step == 0 and int(strategy.optimizer.iterations.numpy()) == 0:
        change()


def _first_trainable(strategy: Strategy) -> int:
    return next(i for i, v in enumerate(strategy.model.variables) if v.trainable)
