"""Computes the three numbers of a strategy: its replicas, the shards of a batch, the copies.

Does not import TensorFlow, so that options are checked with the same numbers before it is loaded.
"""

from typing import Any, NamedTuple

from strategies import has_option


class Layout(NamedTuple):
    """How a strategy splits a batch and the weights over its devices.

    Attributes:
        num_replicas: parts of a batch that are trained on at the same time.
        devices_per_replica: consecutive devices that share the layers of a replica.
        shards_per_replica: parts into which a replica cuts its part of a batch.
        num_copies: copies of the weights.
        weights: relative sizes of the replicas' parts.
    """

    num_replicas: int
    devices_per_replica: int
    shards_per_replica: int
    num_copies: int
    weights: tuple[int, ...]

    @property
    def num_shards(self) -> int:
        """The number of parts with their own loss, gradient and BatchNorm statistics."""
        return self.num_replicas * self.shards_per_replica

    @property
    def fewest_examples(self) -> int:
        """The size of the smallest batch that gives every shard an example.

        A weight w counts as w equal units, and the first units get the remainder: a batch is large
        enough once it reaches the first unit of the last shard.
        """
        return sum(self.weights) * self.shards_per_replica - self.weights[-1] + 1


def layout_of(strategy: str, options: Any, num_devices: int) -> Layout:
    """Returns the layout of a strategy; options that it does not have count as their defaults.

    Args:
        strategy: its name.
        options: its options; see `strategies.base.Strategy`.
        num_devices: devices of all workers.
    """
    devices_per_replica = 1
    if has_option(strategy, "model_parallel"):
        devices_per_replica = options.model_parallel or num_devices
    num_replicas = num_devices // devices_per_replica
    shards_per_replica = 1
    if has_option(strategy, "micro_batches"):
        shards_per_replica = options.micro_batches
    elif has_option(strategy, "accumulate_steps"):
        shards_per_replica = options.accumulate_steps
    splits_weights = has_option(strategy, "shard") and options.shard == "weights"
    weights = options.shard_weights if has_option(strategy, "shard_weights") else ()
    return Layout(
        num_replicas=num_replicas,
        devices_per_replica=devices_per_replica,
        shards_per_replica=shards_per_replica,
        num_copies=1 if splits_weights else num_replicas,
        weights=tuple(weights) or (1,) * num_replicas,
    )
