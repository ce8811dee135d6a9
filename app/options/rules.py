"""Rules over several options; the row of an option has the rule for its own value."""

from typing import TYPE_CHECKING

from app.errors import ConfigError
from app.options.table import NUM_TRAIN_EXAMPLES, options_of
from strategies import ALL_REDUCE_ALGORITHMS

if TYPE_CHECKING:
    from app.options.config import Config

SINGLE, MULTI_WORKER = "single", "multi_worker"
SYNCHRONIZE_BATCH_NORM = ("mirrored", MULTI_WORKER)  # Strategies that have --batch_norm=sync.
_COMMANDS_OF_WORKERS = ("train", "compare", "verify")


def check(config: "Config") -> None:
    """Raises `ConfigError` if options contradict each other, or one would have no effect.

    For a comparison, the options of each training are checked, too.
    """
    _check_command(config)
    _check_devices(config)
    _check_strategies(config)
    _check_fault(config)
    if config.command == "train":
        check_shards(config, config.num_devices)
    if config.is_comparison:
        for name in config.strategies:
            config.for_training(name)


def _check_command(config: "Config") -> None:
    arguments, distribution = config.arguments, config.distribution
    if config.command == "compare" and len(config.strategies) < 2:
        raise ConfigError(f"--strategies must name at least two, got {config.strategies[0]}")
    if config.command == "evaluate" and not arguments.run:
        raise ConfigError("--run is required; write --run=DIR")
    if config.command == "report" and not arguments.directories:
        raise ConfigError("report needs the directory of a run; for example: report runs/*")
    if arguments.experiment and distribution.num_gpus == 1:
        raise ConfigError(f"demo {arguments.experiment} needs at least 2 devices, got 1")
    if arguments.experiment == "split_batch" and distribution.all_reduce != "auto":
        raise ConfigError("--all_reduce is not an option of demo split_batch; leave it out")
    if config.data.dataset == "synthetic" and config.data.data_dir:
        raise ConfigError(
            "--data_dir has no effect with --dataset=synthetic; leave one of them out"
        )


def _check_devices(config: "Config") -> None:
    number = config.distribution.num_gpus or 1
    flag = "--strategies" if "strategies" in options_of(config.command) else "--strategy"
    if set(config.strategies) == {SINGLE} and number > 1:
        raise ConfigError(
            f"{flag}=single runs on one device, got {number} devices; use {flag}=manual or"
            f" {flag}=mirrored"
        )
    if config.has_workers and config.command not in _COMMANDS_OF_WORKERS:
        raise ConfigError(
            f"{flag}={MULTI_WORKER} is not possible in {config.command}, only in"
            f" {', '.join(_COMMANDS_OF_WORKERS)}; choose another strategy"
        )
    if config.has_workers and config.distribution.device == "cpu" and number > 1:
        raise ConfigError(
            f"--num_gpus={number}: multi_worker has one CPU replica per worker; use"
            f" --num_workers={number}"
        )
    if config.distribution.num_workers and not config.has_workers:
        raise ConfigError(
            f"--num_workers={config.distribution.num_workers} needs the strategy {MULTI_WORKER},"
            f" got {', '.join(config.strategies)}; leave the flag out"
        )


def _check_strategies(config: "Config") -> None:
    chosen, options, offers = config.strategies, config.distribution, ALL_REDUCE_ALGORITHMS
    algorithm, flag = options.all_reduce, f"--all_reduce={options.all_reduce}"
    if algorithm != "auto" and offers.keys().isdisjoint(chosen):
        raise ConfigError(
            f"{flag} needs the strategy {' or '.join(offers)}, got {', '.join(chosen)}; leave the"
            " flag out"
        )
    for name in chosen:
        if algorithm not in ("auto", *offers.get(name, (algorithm,))):
            offering = " and ".join(other for other, own in offers.items() if algorithm in own)
            raise ConfigError(
                f"{flag} is not available in {name}, only in {offering}; choose"
                f" {', '.join(('auto', *offers[name]))}"
            )
    if algorithm == "nccl" and options.device == "cpu":
        raise ConfigError("--all_reduce=nccl needs GPUs, got --device=cpu; use --all_reduce=auto")
    # Of a comparison, `single` has the statistics of the whole batch anyway.
    others = [name for name in chosen if name not in (*SYNCHRONIZE_BATCH_NORM, SINGLE)]
    if options.batch_norm == "sync" and (others or set(chosen) == {SINGLE}):
        raise ConfigError(
            f"--batch_norm=sync needs the strategy {' or '.join(SYNCHRONIZE_BATCH_NORM)}, got"
            f" {', '.join(others or chosen)}; use"
            f" {'--strategy=' if len(chosen) == 1 else '--strategies=single,'}mirrored"
        )


def _check_fault(config: "Config") -> None:
    """Checks that the fault of `--inject` can happen, and be detected."""
    fault, name, steps = config.fault, faulty_strategy(config), config.verification.steps
    if fault is None:
        return
    flag = f"--inject={config.verification.inject}"
    if name not in config.strategies:
        raise ConfigError(
            f"{flag} names the strategy {name}, which is not trained; choose one of"
            f" {', '.join(config.strategies)} or leave strategy= out"
        )
    fault.check(1 if name == SINGLE else config.num_devices)
    if config.command == "verify" and fault.step > steps:
        raise ConfigError(f"{flag} needs --steps={fault.step} or more, got --steps={steps}")


def faulty_strategy(config: "Config") -> str | None:
    """Returns the strategy that gets a fault: the named one, or the first with replicas."""
    if config.fault is None:
        return None
    return config.fault.strategy or next((s for s in config.strategies if s != SINGLE), SINGLE)


def check_shards(
    config: "Config", num_devices: int | None, num_train_examples: int | None = None
) -> None:
    """Raises `ConfigError` if a shard of a batch is empty, also of the last one of an epoch.

    A shard without examples has no BatchNorm statistics: its weights silently become NaN.
    """
    replicas, size = num_devices or 1, config.training.global_batch_size
    examples = num_train_examples or config.data.num_train_examples or NUM_TRAIN_EXAMPLES
    if examples < replicas:
        raise ConfigError(f"{replicas} replicas need as many training examples, got {examples}")
    if size < replicas:
        raise ConfigError(
            f"--global_batch_size must be at least the number of replicas, {replicas}, got {size}"
        )
    if 0 < examples % size < replicas:
        possible = [n for n in range(replicas, examples + 1) if not 0 < examples % n < replicas]
        nearest = min(possible, key=lambda each: abs(each - size))
        raise ConfigError(
            f"--global_batch_size={size} leaves {examples % size} of {examples} training examples"
            f" for the last batch, too few for {replicas} replicas; use"
            f" --global_batch_size={nearest}"
        )
