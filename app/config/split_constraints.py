"""Checks combinations of options of a split training."""

from collections.abc import Sequence
from typing import Any

from app.config.option import options_of
from app.config.split_numbers import (
    OPTIONS_OF_SOME,
    fewest_examples,
    has_option,
    num_replicas,
    num_shards,
    shards_per_replica,
)
from app.config.split_options import SplitOptions
from app.runtime.errors import ConfigError
from strategies import STRATEGIES


def check_options_of_some(options: Any, strategies: Sequence[str]) -> None:
    """Checks that an option of some strategies is given only with such a strategy.

    Args:
        options: options of the command.
        strategies: all strategies that it trains with.

    Raises:
        ConfigError: an option would have no effect.
    """
    defaults = {each.name: each.default for each in options_of(options)}
    for name in OPTIONS_OF_SOME:
        if name not in defaults or any(has_option(strategy, name) for strategy in strategies):
            continue
        value = getattr(options, name)
        if value != defaults[name]:
            owners = [strategy for strategy in STRATEGIES if has_option(strategy, name)]
            raise ConfigError(
                f"{shown_flag(name, value)} needs the strategy {_or(owners)}, got"
                f" {', '.join(strategies)}; leave the flag out"
            )


def shown_flag(name: str, value: Any) -> str:
    """Returns an option as it is written on the command line."""
    if value is True:
        return f"--{name}"
    return f"--{name}={','.join(map(str, value)) if isinstance(value, tuple | list) else value}"


def check_sync_batch_norm(batch_norm: str, options: SplitOptions, *, jit_compile: bool) -> None:
    """Checks that BatchNorm over the global batch gets the whole batch at once.

    Raises:
        ConfigError: it does not, or XLA would have to compile communication between devices.
    """
    if batch_norm != "sync":
        return
    if options.accumulate_steps > 1:
        raise ConfigError(
            "--batch_norm=sync needs the whole batch at once, got"
            f" --accumulate_steps={options.accumulate_steps}; leave one of them out"
        )
    if jit_compile:
        raise ConfigError(
            "--jit_compile cannot compile --batch_norm=sync, whose statistics travel between"
            " devices within a forward pass; leave one of them out"
        )


def check_split(strategy: str, options: SplitOptions, num_devices: int) -> None:
    """Checks that the devices can be split according to the options.

    Args:
        strategy: name of the strategy.
        options: options of the training.
        num_devices: devices of all workers.

    Raises:
        ConfigError: the numbers do not fit together.
    """
    size = options.model_parallel
    if has_option(strategy, "model_parallel") and size and num_devices % size:
        divisors = [str(n) for n in range(1, num_devices + 1) if num_devices % n == 0]
        raise ConfigError(
            f"--model_parallel={size} must divide the number of devices, {num_devices}; use"
            f" {_or(divisors)}, or --num_devices={-(-num_devices // size) * size}"
        )
    weights = options.shard_weights
    if has_option(strategy, "shard_weights") and weights:
        needed = num_replicas(strategy, options, num_devices)
        if len(weights) != needed:
            raise ConfigError(
                f"{shown_flag('shard_weights', weights)} must have a weight for each replica,"
                f" {needed}, got {len(weights)}"
            )


def check_parts(
    strategy: str, options: SplitOptions, num_devices: int, global_batch_size: int
) -> None:
    """Checks that a batch has an example for each part of each replica.

    Raises:
        ConfigError: it has too few examples.
    """
    replicas = num_replicas(strategy, options, num_devices)
    parts = shards_per_replica(strategy, options)
    if parts == 1 or not replicas <= global_batch_size < replicas * parts:
        return
    name = "micro_batches" if has_option(strategy, "micro_batches") else "accumulate_steps"
    batch = f"--global_batch_size={global_batch_size}"
    if replicas > 1:
        batch = f"{global_batch_size // replicas}, the share of each of {replicas} replicas in "
        batch += f"--global_batch_size={global_batch_size}"
    raise ConfigError(f"--{name}={parts} must be at most {batch}")


def check_full_batch(
    strategy: str, options: SplitOptions, num_devices: int, global_batch_size: int
) -> None:
    """Checks that weighted shares leave no shard of a full batch empty.

    Raises:
        ConfigError: a shard would be empty.
    """
    fewest = fewest_examples(strategy, options, num_devices)
    if global_batch_size < fewest != num_shards(strategy, options, num_devices):
        raise ConfigError(
            f"{shown_flag('shard_weights', options.shard_weights)} leaves a shard of"
            f" --global_batch_size={global_batch_size} without examples; use"
            f" --global_batch_size={fewest} or more"
        )


def name_shards(strategy: str, options: SplitOptions, num_devices: int) -> str:
    """Returns the parts of a batch, with their number, for a message."""
    replicas = num_replicas(strategy, options, num_devices)
    shards = num_shards(strategy, options, num_devices)
    if fewest_examples(strategy, options, num_devices) != shards:
        return shown_flag("shard_weights", options.shard_weights)
    return f"{replicas} replicas" if shards == replicas else f"{shards} shards"


def _or(words: Sequence[str]) -> str:
    return " or ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)
