"""Rules over several options; the row of an option has the rule for its own value."""

from collections.abc import Sequence

from app.options import names
from app.options.fault import MIN_STRAGGLER_STEPS, Fault
from app.options.names import MULTI_WORKER, SINGLE
from app.options.option import shown_flag
from app.options.table import COMMANDS, options_of
from app.options.values import Values
from app.runtime.errors import ConfigError
from strategies import ALL_REDUCE_ALGORITHMS, OPTIONS_OF_SOME, STRATEGIES, has_option
from strategies.layout import Layout, layout_of

# Strategies that not every command has.
_COMMANDS_OF = {
    MULTI_WORKER: ("train", "compare", "verify", "benchmark"),
    **dict.fromkeys(names.FRAMEWORKS, ("compare", "verify")),
}
# Options of `verify --case`; the file defines all others.
_CASE_OPTIONS = {
    *("case", "thorough", "steps", "strategies", "global_batch_size", "seed", "deterministic"),
    *("num_gpus", "device", "num_devices", "out", "overwrite", "keep_traces", "verbosity"),
}
# Option → the strategies that have it, for each that not all have.
_STRATEGIES_OF = {
    **{name: tuple(s for s in STRATEGIES if has_option(s, name)) for name in OPTIONS_OF_SOME},
    **dict.fromkeys(("num_workers", "max_restarts", "start_timeout_sec"), (MULTI_WORKER,)),
}
# Option → its values that the programs in frameworks/ compute.
_FRAMEWORK_OPTIONS: dict[str, tuple] = {
    "model": ("lenet", "resnet18"),
    "recipe": ("d2l",),
    "precision": ("float32",),
    "batch_norm": ("average",),
    "jit_compile": (False,),
}
_EVEN_FRAMEWORKS = ("jax_jit", "jax_pmap")  # Their replicas have equally many examples.
_SEE = "see docs/verify_your_own.md"


def check(config: Values) -> None:
    """Checks combinations of options.

    Raises:
        ConfigError: two options contradict each other, or one would have no effect.
    """
    _check_devices(config)
    _check_data(config)
    if config.verification.case:
        _check_case(config)
        return
    if config.verification.thorough:
        raise ConfigError(f"--thorough needs --case=FILE; {_SEE}")
    if names.KERAS_FIT in config.strategies:
        raise ConfigError(f"--strategies={names.KERAS_FIT} needs verify --case=FILE; {_SEE}")
    _check_names(config)
    _check_frameworks(config)
    _check_strategies(config)
    _check_fault(config)
    _check_command(config)


def _check_command(config: Values) -> None:
    """Checks what only one command has."""
    if config.command == "compare" and len(config.strategies) < 2:
        chosen = ",".join(config.strategies)
        raise ConfigError(f"--strategies must name at least two, got {chosen}")
    if config.command == "train":
        if config.verification.verify_every == 0 and config.verification.on_mismatch != "stop":
            raise ConfigError(
                f"--on_mismatch={config.verification.on_mismatch} has no effect with"
                " --verify_every=0, which verifies no step; leave one of them out"
            )
        check_shards(config, config.num_devices_of_all_workers)
    if config.benchmark.repeats < names.MIN_ROUNDS:
        raise ConfigError(
            f"--repeats={config.benchmark.repeats} gives no verdict: the intervals of fewer than"
            f" {names.MIN_ROUNDS} rounds are too narrow; use --repeats={names.MIN_ROUNDS} or more"
        )
    if config.benchmark.breakdown:
        _check_breakdown(config)
    if config.command == "report" and not config.words.directories:
        raise ConfigError("report needs the directory of a run; for example: report runs/*")
    if config.command == "demo":
        _check_demo(config)


def _check_breakdown(config: Values) -> None:
    if config.has_workers:
        raise ConfigError(
            "--breakdown measures one machine, got --strategies with multi_worker; leave"
            " multi_worker out"
        )
    if max(config.benchmark.num_devices) == 1 or set(config.strategies) == {SINGLE}:
        raise ConfigError(
            "--breakdown needs a strategy on several devices; use --strategies=manual"
            " --num_devices=2"
        )


def _check_demo(config: Values) -> None:
    name, asked = config.words.experiment, config.num_devices_asked
    if config.demo.wrong and name != "allreduce":
        shown = f"demo {name}" if name else "demo"
        raise ConfigError(f"--wrong is not an option of {shown}, only of demo allreduce")
    if config.demo.wrong and config.distribution.all_reduce != "auto":
        raise ConfigError(
            f"--all_reduce={config.distribution.all_reduce} has no effect with --wrong, which shows"
            " one function; leave one of them out"
        )
    if name and asked == 1:
        raise ConfigError(f"demo {name} needs at least 2 devices, got {asked}")
    if name == "split_batch" and config.distribution.all_reduce != "auto":
        raise ConfigError("--all_reduce is not an option of demo split_batch; leave it out")


def _check_devices(config: Values) -> None:
    devices = config.distribution
    num_gpus, number = devices.num_gpus, devices.num_devices or devices.num_gpus
    if config.command == "benchmark" and "num_devices" in config.changed():
        number = max(config.benchmark.num_devices)
    if num_gpus and devices.device == "cpu":
        raise ConfigError(
            f"--num_gpus={num_gpus} contradicts --device=cpu; use --device=cpu"
            f" --num_devices={num_gpus} for logical CPU devices"
        )
    if num_gpus and devices.num_devices not in (None, num_gpus):
        raise ConfigError(
            f"--num_gpus={num_gpus} contradicts --num_devices={devices.num_devices}: both count"
            " the devices; give one of them"
        )
    if set(config.strategies) == {SINGLE} and number and number > 1:
        flag = _strategy_flag(config)
        raise ConfigError(
            f"{flag}=single runs on one device, got {number} devices; use {flag}=manual or"
            f" {flag}=mirrored"
        )


def _strategy_flag(config: Values) -> str:
    return "--strategies" if "strategies" in options_of(config.command) else "--strategy"


def _check_names(config: Values) -> None:
    """Checks that the command has each strategy."""
    for name in config.strategies:
        commands = _COMMANDS_OF.get(name, tuple(COMMANDS))
        if config.command not in commands:
            raise ConfigError(
                f"{_strategy_flag(config)}={name} is not possible in {config.command}, only in"
                f" {', '.join(commands)}; choose another strategy"
            )


def _check_data(config: Values) -> None:
    """Checks that no data files are given that would not be read."""
    reason = "--dataset=synthetic" if config.data.dataset == "synthetic" else ""
    reason = "--images" if config.evaluation.images else reason
    if reason and (config.data.data_dir or config.data.allow_unverified_data):
        flag = "--data_dir" if config.data.data_dir else "--allow_unverified_data"
        raise ConfigError(
            f"{flag} means nothing with {reason}: no data set is read; leave one of them out"
        )


def _check_strategies(config: Values) -> None:
    """Checks that each option belongs to one of the strategies."""
    chosen, changed = config.own_strategies, config.changed()
    for name, owners in _STRATEGIES_OF.items():
        if name in changed and set(owners).isdisjoint(chosen):
            raise ConfigError(
                f"{shown_flag(name, changed[name])} needs the strategy {_or(owners)}, got"
                f" {', '.join(chosen)}; leave the flag out"
            )
    options = config.distribution
    for name in chosen:
        offered = ("auto", *ALL_REDUCE_ALGORITHMS.get(name, ()))
        if options.all_reduce not in offered and has_option(name, "all_reduce"):
            others = [n for n, a in ALL_REDUCE_ALGORITHMS.items() if options.all_reduce in a]
            raise ConfigError(
                f"--all_reduce={options.all_reduce} is not available in {name}, only in"
                f" {' and '.join(others)}; choose {', '.join(offered)}"
            )
    if options.all_reduce == "nccl" and options.device == "cpu":
        raise ConfigError("--all_reduce=nccl needs GPUs, got --device=cpu; use --all_reduce=auto")
    if options.batch_norm == "sync" and options.accumulate_steps > 1:
        raise ConfigError(
            "--batch_norm=sync needs the whole batch at once, got"
            f" --accumulate_steps={options.accumulate_steps}; leave one of them out"
        )
    if options.batch_norm == "sync" and options.jit_compile:
        raise ConfigError(
            "--jit_compile cannot compile --batch_norm=sync, whose statistics travel between"
            " devices within a forward pass; leave one of them out"
        )


def check_shards(
    config: Values, num_devices: int | None, num_train_examples: int | None = None
) -> None:
    """Checks the split of a training over devices, and that no shard of a batch is empty.

    A shard without examples has no BatchNorm statistics: its weights silently become NaN.

    Args:
        config: config of a training.
        num_devices: devices of all workers; None if it depends on the machine or the cluster.
        num_train_examples: training examples of the dataset; None for the number from the options.

    Raises:
        ConfigError: numbers do not fit together, a shard would be empty, or an epoch would have no
            step.
    """
    options = config.distribution
    if num_devices:
        _check_split(config, num_devices)
    # The smallest possible number of replicas.
    number = num_devices or len(options.shard_weights) or options.model_parallel or 1
    _check_batch(config, number)
    examples = num_train_examples or config.data.num_train_examples or names.NUM_TRAIN_EXAMPLES
    size, drops = config.training.global_batch_size, config.training.last_batch == "drop"
    if drops and examples < size:
        raise ConfigError(
            f"--last_batch=drop leaves no step in an epoch of {examples} examples with"
            f" --global_batch_size={size}; use a smaller batch"
        )
    layout = layout_of(options.strategy, options, number)
    rest, fewest = examples % size, layout.fewest_examples
    if not drops and 0 < rest < fewest:
        replicas, shards = layout.num_replicas, layout.num_shards
        few = f"{replicas} replicas" if shards == replicas else f"{shards} shards"
        if fewest != shards:
            few = shown_flag("shard_weights", options.shard_weights)
        raise ConfigError(
            f"--global_batch_size={size} leaves {rest} of {examples} training examples for the"
            f" last batch, too few for {few}; use --last_batch=drop or another batch size"
        )


def _check_batch(config: Values, num_devices: int) -> None:
    """Checks that each shard has an example of a full batch."""
    options, size = config.distribution, config.training.global_batch_size
    layout = layout_of(options.strategy, options, num_devices)
    replicas, fewest = layout.num_replicas, layout.fewest_examples
    parts = layout.shards_per_replica
    if parts > 1 and replicas <= size < replicas * parts:
        is_pipeline = has_option(options.strategy, "micro_batches")
        share = f"{size // replicas}, the share of each of {replicas} replicas in "
        raise ConfigError(
            f"--{'micro_batches' if is_pipeline else 'accumulate_steps'}={parts} must be at most"
            f" {share if replicas > 1 else ''}--global_batch_size={size}"
        )
    if size < replicas:
        raise ConfigError(
            f"--global_batch_size must be at least the number of replicas, {replicas}, got {size}"
        )
    if size < fewest:
        raise ConfigError(
            f"{shown_flag('shard_weights', options.shard_weights)} leaves a shard of"
            f" --global_batch_size={size} without examples; use --global_batch_size={fewest} or"
            " more"
        )


def _check_split(config: Values, num_devices: int) -> None:
    strategy, options = config.distribution.strategy, config.distribution
    size, weights = options.model_parallel, options.shard_weights
    if size and has_option(strategy, "model_parallel") and num_devices % size:
        divisors = [str(n) for n in range(1, num_devices + 1) if num_devices % n == 0]
        raise ConfigError(
            f"--model_parallel={size} must divide the number of devices, {num_devices}; use"
            f" {_or(divisors)}, or --num_devices={-(-num_devices // size) * size}"
        )
    if weights and has_option(strategy, "shard_weights") and len(weights) != num_devices:
        raise ConfigError(
            f"{shown_flag('shard_weights', weights)} must have a weight for each replica,"
            f" {num_devices}, got {len(weights)}"
        )


def _layout(config: Values, strategy: str) -> Layout | None:
    """Returns the layout of a strategy; None if its devices are not known yet."""
    number = 1 if strategy == SINGLE else config.num_devices_of_all_workers
    return layout_of(strategy, config.distribution, number) if number else None


def faulty_strategy(config: Values) -> str | None:
    """Returns the strategy that gets the fault: the named one, or the first that supports it.

    None without a fault.
    """
    fault = config.verification.fault
    if fault is None:
        return None
    chosen = [name for name in config.own_strategies if name != SINGLE] or [SINGLE]
    able = [name for name in chosen if fault.can_happen(name, _layout(config, name))]
    return fault.strategy or (able or chosen)[0]


def _check_fault(config: Values) -> None:
    """Checks that the fault of `--inject` can happen, and be detected."""
    fault, chosen = config.verification.fault, config.own_strategies
    if fault is None:
        return
    if fault.strategy not in (None, *chosen):
        raise ConfigError(
            f"--inject={config.verification.inject} names the strategy {fault.strategy}, which is"
            f" not trained; choose one of {', '.join(chosen)} or leave strategy= out"
        )
    strategy = faulty_strategy(config) or ""
    fault.check(strategy, _layout(config, strategy))
    if config.command == "verify":
        _check_fault_steps(config, fault)


def _check_fault_steps(config: Values, fault: Fault) -> None:
    """Checks that a verification has enough steps for the fault to be detected."""
    flag, steps = f"--inject={config.verification.inject}", config.verification.steps
    if fault.parameters.get("step", 0) > steps:
        needed = fault.parameters["step"]
        raise ConfigError(f"{flag} needs --steps={needed} or more, got --steps={steps}")
    if fault.name == "slow_replica" and steps < MIN_STRAGGLER_STEPS:
        raise ConfigError(
            f"{flag} needs --steps={MIN_STRAGGLER_STEPS} or more, to tell a straggler from chance,"
            f" got --steps={steps}"
        )


def _check_case(config: Values) -> None:
    for name in config.changed():
        if name not in _CASE_OPTIONS:
            raise ConfigError(
                f"--{name} has no part in --case, whose file defines model, data and training;"
                " leave the flag out"
            )
    for name in config.strategies:
        if name not in names.CASE_STRATEGIES:
            allowed = ",".join(names.CASE_STRATEGIES)
            raise ConfigError(
                f"--strategies={name} does not run a case; use --strategies={allowed}"
            )
    case, path = config.verification.case, config.verification.case_path
    if not path.is_file():
        raise ConfigError(f"--case={case}: there is no file {path}; name a Python file")
    if path.suffix != ".py":
        raise ConfigError(f"--case={case} must be a Python file, whose name ends in .py")


def _check_frameworks(config: Values) -> None:
    """Checks that the frameworks among the strategies support the training."""
    chosen = [name for name in config.strategies if name in names.FRAMEWORKS]
    if not chosen:
        return
    shown, changed = ",".join(chosen), config.changed()
    if not config.own_strategies:
        raise ConfigError(f"--strategies={shown}: has no strategy to compare with; add single")
    for name, values in _FRAMEWORK_OPTIONS.items():
        if changed.get(name, values[0]) not in values:
            others = " or ".join(f"--{name}={value}" for value in values)
            raise ConfigError(
                f"{shown_flag(name, changed[name])} does not run in {chosen[0]}; use {others}, or"
                f" leave {shown} out of --strategies"
            )
    if config.distribution.num_gpus or config.distribution.device == "gpu":
        raise ConfigError(
            f"{chosen[0]} runs on CPUs here; use --device=cpu --num_devices=N, or leave it out of"
            " --strategies"
        )
    even = [name for name in chosen if name in _EVEN_FRAMEWORKS]
    replicas, size = config.num_framework_replicas, config.training.global_batch_size
    examples = config.data.num_train_examples or names.NUM_TRAIN_EXAMPLES
    last = examples % size if config.training.last_batch == "keep" else 0
    if even and size % replicas:
        raise ConfigError(
            f"--global_batch_size={size} does not divide over {replicas} replicas, as {even[0]}"
            f" requires; use --global_batch_size={max(1, size // replicas) * replicas}"
        )
    if even and last % replicas:
        raise ConfigError(
            f"the last batch of {last} examples does not divide over {replicas} replicas, as"
            f" {even[0]} requires; use --last_batch=drop"
        )


def _or(words: Sequence[str]) -> str:
    return " or ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)
