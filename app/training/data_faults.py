"""Injects faults into the dataset; see `fault_injection.py`."""

from collections.abc import Callable

import tensorflow as tf

from app.options.fault import Fault
from strategies.base import Strategy

Batch = tuple[tf.Tensor, tf.Tensor]  # Images and labels.


def inject_data_fault(
    fault: Fault,
    create_dataset: Callable[[int], tf.data.Dataset],
    strategy: Strategy,
    *,
    seed: int,
) -> tf.data.Dataset:
    """Returns the training dataset with the fault injected, if it is a fault of the data.

    Args:
        fault: the fault.
        create_dataset: creates the dataset of global batches with the order for a seed.
        strategy: the strategy whose shards get the fault.
        seed: seed of the training.
    """
    dataset = create_dataset(seed)
    if fault.name == "same_shard":

        def repeat_first_shard(images: tf.Tensor, labels: tf.Tensor) -> Batch:
            shards = range(strategy.num_shards)
            bounds = [strategy.shard_bounds(tf.size(labels), s) for s in shards]
            first = bounds[0][1]  # A larger shard repeats the examples.
            rows = tf.concat([tf.range(end - start) % first for start, end in bounds], axis=0)
            return tf.gather(images, rows), tf.gather(labels, rows)

        return dataset.map(repeat_first_shard)
    if fault.name == "shuffle_order":

        def take_one_part_from(right: Batch, wrong: Batch) -> tuple[tf.Tensor, ...]:
            num_examples, num = tf.size(right[1]), strategy.shards_per_replica
            first = int(fault.parameters["replica"]) * num
            start, _ = strategy.shard_bounds(num_examples, first)
            _, end = strategy.shard_bounds(num_examples, first + num - 1)
            return tuple(
                tf.concat([a[:start], b[start:end], a[end:]], axis=0)
                for a, b in zip(right, wrong, strict=True)
            )

        return tf.data.Dataset.zip(dataset, create_dataset(seed + 1)).map(take_one_part_from)
    return dataset
