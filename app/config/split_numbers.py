"""Computes the number of replicas, shards and copies of a strategy."""

from app.config.names import SINGLE
from app.config.option import options_of
from app.config.split_options import SplitOptions
from strategies import ALL_REDUCE_ALGORITHMS, STRATEGY_OPTIONS, WITHOUT_JIT_COMPILE

ALL_REDUCE_OPTIONS = ("all_reduce", "bucket_mib", "communication_dtype")
# Options that not every strategy has, in the order of `--help`.
OPTIONS_OF_SOME = (
    *("batch_norm", *(each.name for each in options_of(SplitOptions))),
    *(*ALL_REDUCE_OPTIONS, "jit_compile"),
)


def has_option(strategy: str, name: str) -> bool:
    """Returns whether a strategy has an option, one of `OPTIONS_OF_SOME`."""
    if name in ALL_REDUCE_OPTIONS:  # An option with a single algorithm may be in no table.
        return strategy in ALL_REDUCE_ALGORITHMS or strategy not in STRATEGY_OPTIONS
    if name == "jit_compile":
        return strategy not in WITHOUT_JIT_COMPILE
    return name in STRATEGY_OPTIONS.get(strategy, ())


def num_replicas(strategy: str, options: SplitOptions, num_devices: int) -> int:
    """Returns the number of parts that train on different examples and all-reduce gradients."""
    if strategy == SINGLE:
        return 1
    if has_option(strategy, "model_parallel"):
        return num_devices // (options.model_parallel or num_devices)
    return num_devices


def shards_per_replica(strategy: str, options: SplitOptions) -> int:
    """Returns the number of parts into which each replica cuts its part of a batch."""
    if has_option(strategy, "micro_batches"):
        return options.micro_batches
    return options.accumulate_steps if has_option(strategy, "accumulate_steps") else 1


def num_shards(strategy: str, options: SplitOptions, num_devices: int) -> int:
    """Returns the number of parts with their own loss, gradient and BatchNorm statistics."""
    return num_replicas(strategy, options, num_devices) * shards_per_replica(strategy, options)


def num_copies(strategy: str, options: SplitOptions, num_devices: int) -> int:
    """Returns the number of copies of the weights."""
    if has_option(strategy, "shard") and options.shard == "weights":
        return 1
    return num_replicas(strategy, options, num_devices)


def fewest_examples(strategy: str, options: SplitOptions, num_devices: int) -> int:
    """Returns the size of the smallest batch that gives every shard an example.

    With `--shard_weights`, a weight w counts as w equal units, and the first units get the
    remainder: a batch is large enough once it reaches the first unit of the last shard.
    """
    weights = options.shard_weights
    if not weights or not has_option(strategy, "shard_weights"):
        return num_shards(strategy, options, num_devices)
    return sum(weights) * shards_per_replica(strategy, options) - weights[-1] + 1
