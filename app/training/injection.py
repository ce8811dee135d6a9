"""Injects a fault through the observer of a strategy, or through the dataset."""

import functools
from collections.abc import Collection
from typing import Any

import numpy as np
import tensorflow as tf

from app.errors import ConfigError
from app.faults import Fault
from strategies.base import Observer, Shard, Strategy
from strategies.sharded import SplitVariable

_PERTURBATION = 1e-3


class FaultyObserver(Observer):
    """Injects a fault into a built strategy.

    Raises:
        ConfigError: the fault has no effect on a training with so many steps and such batches.
    """

    def __init__(
        self, fault: Fault, strategy: Strategy, *, batch_sizes: Collection[int], num_steps: int
    ):
        self._fault, self._strategy = fault, strategy
        fault.check(strategy.num_replicas)
        if fault.step > num_steps:
            raise ConfigError(
                f"--inject={fault}: the training ends after step {num_steps}; use step={num_steps}"
                " or less"
            )
        num_shards = strategy.num_shards
        if fault.name == "mean_of_means" and not any(size % num_shards for size in batch_sizes):
            shown = " and ".join(map(str, sorted(batch_sizes, reverse=True)))
            raise ConfigError(
                f"--inject={fault} changes nothing with batches of {shown} in {num_shards} equal"
                f" shards; use --global_batch_size={max(batch_sizes) + 1}"
            )
        self._copies = dict(zip(strategy.local_copy_ids, strategy.copies(), strict=True))
        first = next(iter(self._copies.values()))
        self._slots = [n for n, v in first.items() if n.startswith("optimizer/") and v.shape.rank]
        if fault.name == "reset_optimizer_state" and not self._slots:
            raise ConfigError(f"--inject={fault} needs an optimizer with state; use --recipe=fast")
        # Of sharded weights, each device has rows of the one with the most rows.
        weights = [f"model/{v.path}" for v in strategy.model.trainable_variables]
        self._weight = max(weights, key=lambda name: first[name].shape[0])
        self._iteration = _part_of(first["optimizer/iteration"], 0)

    def batches(self, dataset: tf.data.Dataset) -> tf.data.Dataset:
        """Returns the dataset of global batches with the fault, if it is a fault of the data."""
        if self._fault.name != "same_shard":
            return dataset

        @tf.autograph.experimental.do_not_convert
        def repeat_first_shard(images: tf.Tensor, labels: tf.Tensor) -> tuple[tf.Tensor, ...]:
            shard_ids = range(self._strategy.num_shards)
            bounds = [self._strategy.shard_bounds(tf.size(labels), r) for r in shard_ids]
            rows = tf.concat([tf.range(end - start) for start, end in bounds], axis=0)
            return tf.gather(images, rows), tf.gather(labels, rows)

        return dataset.map(repeat_first_shard)

    def on_shard(
        self,
        shard_id: int | tf.Tensor,
        shard: Shard,
        logits: tf.Tensor,
        loss: tf.Tensor,
        gradients: list[tf.Tensor],
    ) -> list[tf.Tensor]:
        """Returns the gradients that the replica sends instead of its own."""
        name, parameters = self._fault.name, self._fault.parameters
        if name == "drop_gradient":
            factor = tf.where(tf.equal(shard_id, int(parameters["replica"])), 0.0, 1.0)
        elif name == "scale_gradient":
            factor = tf.constant(parameters["factor"])
        elif name == "mean_of_means":  # Divide each shard's sum by its own size, then average.
            num_examples = tf.size(shard.labels) * self._strategy.num_shards
            factor = tf.cast(shard.num_global_examples / num_examples, tf.float32)
        else:
            return gradients
        has_begun = tf.cast(self._iteration, tf.int64) + 1 >= self._fault.step
        return [tf.where(has_begun, g * tf.cast(factor, g.dtype), g) for g in gradients]

    def on_update(self, copy_id: int | tf.Tensor, summed_gradients: list[tf.Tensor]) -> None:
        """Changes the state of a copy after the step of the fault."""
        actions = {"perturb_weight": self._perturb, "reset_optimizer_state": self._reset}
        if self._fault.name not in actions:
            return
        is_step = tf.equal(tf.cast(self._iteration, tf.int64), self._fault.step)
        for own_id in self._copies:
            if tf.is_tensor(copy_id) or copy_id == own_id:
                change = functools.partial(actions[self._fault.name], own_id)
                tf.cond(is_step & tf.equal(copy_id, own_id), change, lambda: False)

    def _perturb(self, copy_id: int) -> bool:
        """Changes a weight of the faulty replica, like a defective memory chip."""
        replica, whole = int(self._fault.parameters["replica"]), self._copies[copy_id][self._weight]
        if isinstance(whole, SplitVariable) or replica == copy_id:
            weight = _part_of(whole, replica)
            change = np.zeros(weight.shape, weight.dtype.as_numpy_dtype)
            change.flat[0] = _PERTURBATION
            weight.assign_add(change)
        return True

    def _reset(self, copy_id: int) -> bool:
        """Sets the optimizer's state to 0; the number of steps stays."""
        for name in self._slots:
            variable = self._copies[copy_id][name]
            for part in getattr(variable, "parts", [variable]):
                part.assign(tf.zeros_like(part))
        return True


def _part_of(variable: Any, device: int) -> tf.Variable:
    """Returns a variable; of one that is split or copied over devices, the part of a device."""
    return variable.parts[device] if isinstance(variable, SplitVariable) else variable
