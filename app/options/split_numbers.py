"""Says which strategy has which option, and computes its numbers of replicas, shards and copies."""

from app.options.names import SINGLE
from app.options.table import Distribution
from strategies import STRATEGY_OPTIONS

# Options that not every strategy has.
OPTIONS_OF_SOME = tuple(dict.fromkeys(name for own in STRATEGY_OPTIONS.values() for name in own))


def has_option(strategy: str, name: str) -> bool:
    """Returns whether a strategy has an option, one of `OPTIONS_OF_SOME`."""
    return name in STRATEGY_OPTIONS.get(strategy, ())


def num_replicas(strategy: str, options: Distribution, num_devices: int) -> int:
    """Returns the number of parts that train on different examples and all-reduce gradients."""
    if strategy == SINGLE:
        return 1
    if has_option(strategy, "model_parallel"):
        return num_devices // (options.model_parallel or num_devices)
    return num_devices


def shards_per_replica(strategy: str, options: Distribution) -> int:
    """Returns the number of parts into which each replica cuts its part of a batch."""
    if has_option(strategy, "micro_batches"):
        return options.micro_batches
    return options.accumulate_steps if has_option(strategy, "accumulate_steps") else 1


def num_shards(strategy: str, options: Distribution, num_devices: int) -> int:
    """Returns the number of parts with their own loss, gradient and BatchNorm statistics."""
    return num_replicas(strategy, options, num_devices) * shards_per_replica(strategy, options)


def num_copies(strategy: str, options: Distribution, num_devices: int) -> int:
    """Returns the number of copies of the weights."""
    if has_option(strategy, "shard") and options.shard == "weights":
        return 1
    return num_replicas(strategy, options, num_devices)


def fewest_examples(strategy: str, options: Distribution, num_devices: int) -> int:
    """Returns the size of the smallest batch that gives every shard an example.

    With `--shard_weights`, a weight w counts as w equal units, and the first units get the
    remainder: a batch is large enough once it reaches the first unit of the last shard.
    """
    weights = options.shard_weights
    if not weights or not has_option(strategy, "shard_weights"):
        return num_shards(strategy, options, num_devices)
    return sum(weights) * shards_per_replica(strategy, options) - weights[-1] + 1
