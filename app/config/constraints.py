"""Checks combinations of options; an option's own metadata checks its value."""

from collections.abc import Callable, Iterable, Sequence

from app.config.distribution_options import AllReduceOptions, DeviceOptions
from app.config.fault import MIN_STRAGGLER_STEPS, Fault
from app.config.model_options import DataFileOptions, DatasetOptions
from app.config.names import MULTI_WORKER, SINGLE
from app.config.split_numbers import ALL_REDUCE_OPTIONS, has_option
from app.runtime.errors import ConfigError
from strategies import ALL_REDUCE_ALGORITHMS


def check_devices(options: DeviceOptions) -> None:
    """Checks that the flags for the number of devices agree.

    Raises:
        ConfigError: they contradict each other.
    """
    num_gpus = options.num_gpus
    if num_gpus and options.device == "cpu":
        raise ConfigError(
            f"--num_gpus={num_gpus} contradicts --device=cpu; use --device=cpu"
            f" --num_devices={num_gpus} for logical CPU devices"
        )
    if num_gpus and options.num_devices not in (None, num_gpus):
        raise ConfigError(
            f"--num_gpus={num_gpus} contradicts --num_devices={options.num_devices}: both count"
            " the devices; give one of them"
        )


def check_single(flag: str, strategies: Iterable[str], num_devices: int | None) -> None:
    """Checks that `single`, if it is the only strategy, has one device.

    Raises:
        ConfigError: it has more devices.
    """
    if set(strategies) == {SINGLE} and num_devices and num_devices > 1:
        raise ConfigError(
            f"{flag}=single runs on one device, got {num_devices} devices; use {flag}=manual or"
            f" {flag}=mirrored"
        )


def check_workers(
    has_workers: bool, strategies: Iterable[str], **given: tuple[int | None, int | None]
) -> None:
    """Checks that options of workers are given only for a strategy with workers.

    Args:
        has_workers: whether a strategy has workers.
        strategies: all strategies.
        **given: option → its value and its default.

    Raises:
        ConfigError: an option would have no effect.
    """
    for name, (value, default) in given.items():
        if not has_workers and value != default:
            raise ConfigError(
                f"--{name}={value} needs the strategy {MULTI_WORKER}, got {', '.join(strategies)};"
                " leave the flag out"
            )


def check_all_reduce(options: AllReduceOptions, strategies: Sequence[str], device: str) -> None:
    """Checks that every strategy has the requested all-reduce.

    Raises:
        ConfigError: a strategy does not, or these devices cannot run it.
    """
    has_all_reduce = [name for name in strategies if has_option(name, "all_reduce")]
    for name in ALL_REDUCE_OPTIONS:
        value = getattr(options, name)
        if value != getattr(AllReduceOptions, name) and set(strategies) == {SINGLE}:
            raise ConfigError(
                f"--{name}={value} means nothing to single, which has one device; leave the flag"
                " out"
            )
    check_algorithm(options.all_reduce, has_all_reduce, device)


def check_algorithm(algorithm: str, strategies: Iterable[str], device: str) -> None:
    """Checks that strategies have an all-reduce algorithm.

    Raises:
        ConfigError: a strategy does not, or these devices cannot run it.
    """
    if algorithm == "auto":
        return
    for name in strategies:
        offered = ALL_REDUCE_ALGORITHMS.get(name, ())
        if algorithm not in offered:
            owners = [n for n, names in ALL_REDUCE_ALGORITHMS.items() if algorithm in names]
            raise ConfigError(
                f"--all_reduce={algorithm} is not available in {name}, only in"
                f" {' and '.join(owners)}; choose auto{''.join(f', {n}' for n in offered)}"
            )
    if algorithm == "nccl" and device == "cpu":
        raise ConfigError("--all_reduce=nccl needs GPUs, got --device=cpu; use --all_reduce=auto")


def check_dataset(options: DatasetOptions) -> None:
    """Checks that no data files are given for generated images.

    Raises:
        ConfigError: data files are given.
    """
    check_data_files(options, "--dataset=synthetic" if options.dataset == "synthetic" else "")


def check_data_files(options: DataFileOptions, reads_no_data: str) -> None:
    """Checks that no data files are given that would not be read.

    Args:
        options: options of the data files.
        reads_no_data: the flag because of which no dataset is read; "" if one is.

    Raises:
        ConfigError: data files are given.
    """
    if reads_no_data and (options.data_dir or options.allow_unverified_data):
        flag = "--data_dir" if options.data_dir else "--allow_unverified_data"
        raise ConfigError(
            f"{flag} means nothing with {reads_no_data}: no data set is read; leave one of them out"
        )


def check_fault(
    fault: Fault | None,
    flag: str,
    strategies: Iterable[str],
    count: Callable[[str, Fault], int | None],
) -> None:
    """Checks that a fault can be injected.

    Args:
        fault: the fault to inject; None for none.
        flag: `--inject` with its value.
        strategies: the strategies to train.
        count: strategy, fault → number of the units that the fault counts; None if it depends on
            the machine.

    Raises:
        ConfigError: the fault's strategy is not trained, or does not support the fault.
    """
    if fault is None:
        return
    trained = tuple(strategies)
    if fault.strategy not in (None, *trained):
        raise ConfigError(
            f"{flag} names the strategy {fault.strategy}, which is not trained; choose one of"
            f" {', '.join(trained)} or leave strategy= out"
        )
    strategy = faulty_strategy(fault, trained, count)
    fault.check(strategy, count(strategy, fault))


def faulty_strategy(
    fault: Fault, strategies: Iterable[str], count: Callable[[str, Fault], int | None]
) -> str:
    """Returns the strategy that gets a fault: the named one, or the first that supports it.

    Args:
        fault, strategies, count: see `check_fault`.
    """
    parallel = [name for name in strategies if name != SINGLE] or [SINGLE]
    able = [name for name in parallel if fault.can_happen(name, count(name, fault))]
    return fault.strategy or (able or parallel)[0]


def check_fault_steps(fault: Fault | None, flag: str, num_steps: int) -> None:
    """Checks that a verification has enough steps for a fault.

    Raises:
        ConfigError: it would end before the fault takes effect or can be detected.
    """
    if fault is None:
        return
    step = fault.parameters.get("step", 0)
    if step > num_steps:
        raise ConfigError(f"{flag} needs --steps={step} or more, got --steps={num_steps}")
    if fault.name == "slow_replica" and num_steps < MIN_STRAGGLER_STEPS:
        raise ConfigError(
            f"{flag} needs --steps={MIN_STRAGGLER_STEPS} or more, to tell a straggler from chance,"
            f" got --steps={num_steps}"
        )


def check_shards(
    *,
    global_batch_size: int,
    last_batch: str,
    num_replicas: int,
    num_train_examples: int,
    fewest: int | None = None,
    shards: str = "",
) -> None:
    """Checks that every shard has an example of every batch, including the last one.

    A shard without examples has no BatchNorm statistics: its weights silently become NaN. This
    check rejects such a training before the first step.

    Args:
        global_batch_size, last_batch, num_train_examples: of the training.
        num_replicas: R.
        fewest: size of the smallest batch without an empty shard; None for R.
        shards: description of the shards for the message; "" for R replicas.

    Raises:
        ConfigError: a shard would be empty, or an epoch would have no step.
    """
    if global_batch_size < num_replicas:
        raise ConfigError(
            f"--global_batch_size must be at least the number of replicas, {num_replicas}, got"
            f" {global_batch_size}"
        )
    check_has_step(global_batch_size, last_batch, num_train_examples)
    rest = num_train_examples % global_batch_size
    if last_batch == "keep" and 0 < rest < (fewest or num_replicas):
        raise ConfigError(
            f"--global_batch_size={global_batch_size} leaves {rest} of {num_train_examples}"
            f" training examples for the last batch, too few for"
            f" {shards or f'{num_replicas} replicas'}; use --last_batch=drop or another batch size"
        )


def check_has_step(global_batch_size: int, last_batch: str, num_train_examples: int) -> None:
    """Checks that an epoch has at least one step.

    Raises:
        ConfigError: it has none.
    """
    if last_batch == "drop" and num_train_examples < global_batch_size:
        raise ConfigError(
            f"--last_batch=drop leaves no step in an epoch of {num_train_examples} examples with"
            f" --global_batch_size={global_batch_size}; use a smaller batch"
        )
