"""What a configuration must be: one line of refusal for each way in which it cannot be meant."""

from typing import TYPE_CHECKING

from app.config.fault import MIN_STEPS
from app.config.options import (
    ALL_REDUCE_NAMES,
    ALL_REDUCE_OPTIONS,
    COMMANDS,
    LARGEST_FLOAT32,
    MAX_BUCKET_MIB,
    MAX_LOCAL_WORKERS,
    MAX_LOGICAL_DEVICES,
    MAX_PLANNED,
    MAX_PLANNED_BATCH,
    MODEL_NAMES,
    NUM_TRAIN_EXAMPLES,
    ON_ONE_MACHINE,
    ON_SEVERAL,
    PRECISIONS,
    RECIPE_NAMES,
    STRATEGY_NAMES,
)
from app.runtime.errors import ConfigError

if TYPE_CHECKING:
    from app.config.command_configs import Config


def validate(config: "Config") -> None:
    """Checks a configuration, each value and all of them together.

    Raises:
        ConfigError: a value that cannot be meant, or two that contradict each other.
    """
    _check_names(config)
    _check_numbers(config)
    _check_devices(config)
    _check_command(config)
    _check_proof(config)
    _check_lists(config)
    if config.command == "explain":
        _check_explain(config)
    if config.command in ("train", "launch", "compare", "verify"):
        num_train_examples = config.num_train_examples or NUM_TRAIN_EXAMPLES
        check_shards(config, config.num_replicas_asked or 1, num_train_examples)


def _check_names(config):
    check_choice("COMMAND", config.command, COMMANDS)
    check_choice("--model", config.model, MODEL_NAMES)
    check_choice("--dataset", config.dataset, ("auto", "fashion_mnist", "synthetic"))
    check_choice("--recipe", config.recipe, RECIPE_NAMES)
    check_choice("--strategy", config.strategy, STRATEGY_NAMES)
    if config.strategy == "multi_worker" and config.command not in ("train", "launch"):
        raise ConfigError(
            f"--strategy=multi_worker with {config.command} — one of {', '.join(ON_ONE_MACHINE)} is"
            f" required, for {config.command} runs on one machine; leave the flag out"
        )
    check_choice("--device", config.device, ("auto", "gpu", "cpu"))
    known = dict.fromkeys(name for names in ALL_REDUCE_NAMES.values() for name in names)
    check_choice("--all_reduce", config.all_reduce, ("auto", *known))
    check_choice("--communication_dtype", config.communication_dtype, ("float32", "bfloat16"))
    check_choice("--precision", config.precision, PRECISIONS)
    check_choice("--batch_norm", config.batch_norm, ("average", "sync"))
    check_choice("--last_batch", config.last_batch, ("keep", "drop"))
    check_choice("--checkpoint", config.checkpoint, ("newest", "best"))
    for strategy in config.strategies:
        if strategy not in STRATEGY_NAMES:
            raise ConfigError(
                f"--strategies={strategy} in {','.join(config.strategies)!r} — one of"
                f" {', '.join(STRATEGY_NAMES)} is required; see --help"
            )


def _check_numbers(config):
    _check_range("--num_devices", config.num_devices, 1, None)
    _check_range("--num_gpus", config.num_gpus, 1, None)
    _check_range("--global_batch_size", config.global_batch_size, 1, NUM_TRAIN_EXAMPLES)
    _check_range("--epochs", config.epochs, 1, 100_000)
    _check_range("--seed", config.seed, 0, 2**32 - 1)
    _check_range("--verbosity", config.verbosity, -1, 1)
    _check_range("--num_train_examples", config.num_train_examples, 1, NUM_TRAIN_EXAMPLES)
    _check_range("--steps_per_call", config.steps_per_call, 1, 1_000_000)
    _check_range("--checkpoint_every", config.checkpoint_every, 1, 1_000_000_000)
    _check_range("--stall_timeout_sec", config.stall_timeout_sec, 0, 1_000_000)
    planned = config.command == "plan"
    most = MAX_PLANNED if planned else MAX_LOCAL_WORKERS
    _check_range("--num_workers", config.num_workers, 1, most)
    _check_range("--devices_per_worker", config.devices_per_worker, 1, 64)
    for flag in ("bandwidth_gbps", "device_bandwidth_gbps"):
        _check_range(f"--{flag}", getattr(config, flag), 0.001, 1e6)
    _check_range("--latency_us", config.latency_us, 0, 1e6)
    _check_range("--global_batch_size", config.planned_global_batch_size, 1, MAX_PLANNED_BATCH)
    if planned:
        _check_planned_batch(config)
    _check_range("--max_restarts", config.max_restarts, 0, 1000)
    _check_range("--start_timeout_sec", config.start_timeout_sec, 1, 1_000_000)
    if config.bucket_mib is not None and not 0 <= config.bucket_mib <= MAX_BUCKET_MIB:
        raise ConfigError(
            f"--bucket_mib={config.bucket_mib} — 0 to {MAX_BUCKET_MIB} is required; 0 exchanges"
            " each gradient by itself"
        )
    if config.learning_rate is not None and not (0 < config.learning_rate <= LARGEST_FLOAT32):
        raise ConfigError(
            f"--learning_rate={config.learning_rate} — a finite number above 0 is required;"
            " leave it out for the recipe's own"
        )


def _check_planned_batch(config):
    num_planned = config.num_workers * config.num_devices_planned
    batch = config.planned_batch_size
    if batch < num_planned:
        raise ConfigError(
            f"--global_batch_size={batch} for {num_planned} devices — at least one image for each"
            f" is required; use {num_planned} or more"
        )
    _check_has_step(config, batch, config.num_train_examples or NUM_TRAIN_EXAMPLES)


def _check_has_step(config, global_batch_size, num_train_examples):
    if config.last_batch == "drop" and num_train_examples < global_batch_size:
        raise ConfigError(
            f"--last_batch=drop with {num_train_examples} training examples and"
            f" --global_batch_size={global_batch_size} — an epoch would have no step; use a smaller"
            " batch"
        )


def _check_devices(config):
    if config.num_gpus and config.device == "cpu":
        raise ConfigError(
            f"--num_gpus={config.num_gpus} with --device=cpu — one or the other is required;"
            f" use --device=cpu --num_devices={config.num_gpus} for logical CPU devices"
        )
    if config.num_gpus and config.num_devices not in (None, config.num_gpus):
        raise ConfigError(
            f"--num_gpus={config.num_gpus} with --num_devices={config.num_devices}"
            " — both count the replicas; give one of them"
        )
    num_devices = config.num_devices or config.num_gpus or 1
    if num_devices > MAX_LOGICAL_DEVICES:
        raise ConfigError(
            f"{num_devices} devices asked for — at most {MAX_LOGICAL_DEVICES} on one machine;"
            " use fewer"
        )
    several = config.command in ON_SEVERAL
    _check_workers(config)
    names = config.strategies if several else (config.strategy,)
    if set(names) == {"single"} and num_devices > 1:
        flag = "strategies" if several else "strategy"
        raise ConfigError(
            f"--{flag}=single with {num_devices} devices — single runs on one device;"
            f" use --{flag}=manual or --{flag}=mirrored"
        )
    _check_all_reduce(config, names)


def _check_workers(config):
    """Refuses what means something to a cluster alone."""
    if config.has_workers or config.command == "plan":
        return
    for flag in ("num_workers", "start_timeout_sec"):
        value = getattr(config, flag)
        if value != getattr(type(config), flag):
            names = config.strategies if config.command in ON_SEVERAL else (config.strategy,)
            raise ConfigError(
                f"--{flag}={value} with {', '.join(names)} — multi_worker is required, which alone"
                " has workers; name it, or leave the flag out"
            )


def _check_all_reduce(config, strategies):
    """Refuses an exchange that a strategy does not have, or that these devices cannot do."""
    parallel = [name for name in strategies if name != "single"]
    for flag in ALL_REDUCE_OPTIONS:
        value = getattr(config, flag)
        if value == getattr(type(config), flag):
            continue
        if not parallel:
            raise ConfigError(
                f"--{flag}={value} with single — one device has nothing to exchange; leave the"
                " flag out"
            )
        without = [n for n in parallel if value not in ALL_REDUCE_NAMES.get(n, (value,))]
        if flag == "all_reduce" and without:
            owners = [name for name, names in ALL_REDUCE_NAMES.items() if value in names]
            raise ConfigError(
                f"--all_reduce={value} with {', '.join(without)} — one of"
                f" {', '.join(ALL_REDUCE_NAMES[without[0]])} is required there;"
                f" {' and '.join(owners)} alone has {value}"
            )
    if config.all_reduce == "nccl" and config.device == "cpu":
        raise ConfigError(
            "--all_reduce=nccl with --device=cpu — NCCL connects GPUs; use --all_reduce=auto"
        )


def _check_proof(config):
    _check_range("--steps", config.steps, 1, 100_000)
    if config.command == "verify" and config.precision == "mixed_float16":
        raise ConfigError(
            "--precision=mixed_float16 with verify — a precision that needs no loss scale is"
            " required; use --precision=mixed_bfloat16 or float32"
        )
    fault = config.fault
    if fault is None:
        return
    trained = config.strategies if config.command == "verify" else (config.strategy,)
    if fault.strategy not in (None, *trained):
        raise ConfigError(
            f"--inject={config.inject} spoils {fault.strategy}, which is not trained — one of"
            f" {', '.join(trained)} is required; name it or leave strategy= out"
        )
    if fault.parameters.get("step", 0) > config.steps and config.command == "verify":
        raise ConfigError(
            f"--inject={config.inject} with --steps={config.steps} — a step that is made is"
            f" required; use --steps={fault.parameters['step']} or more"
        )
    if config.command == "verify" and fault.name == "slow_replica" and config.steps < MIN_STEPS:
        raise ConfigError(
            f"--inject={config.inject} with --steps={config.steps} — {MIN_STEPS} steps are required"
            f" to tell a slow replica from chance; use --steps={MIN_STEPS} or more"
        )
    if fault.strategy == "single" or set(trained) == {"single"}:
        fault.check_replica_divergence(1)
    elif config.num_replicas_asked:
        fault.check_replica_divergence(config.num_replicas_asked)


def _check_explain(config):
    """Checks what `explain` measures: rising numbers of devices, each with full shards."""
    shown = ",".join(map(str, config.counts))
    if config.strategy == "single" or list(config.counts) != sorted({*config.counts} - {1}):
        raise ConfigError(
            f"--strategy={config.strategy} --num_devices={shown} with explain — a strategy with"
            " replicas and rising numbers of devices above 1 are required: the first is"
            " explained, the last of three or more predicted; for example"
            " --strategy=manual --num_devices=2,3,4"
        )
    if config.all_reduce == "hierarchical":
        raise ConfigError(
            "--all_reduce=hierarchical with explain — an all-reduce whose cost is known is"
            " required; use --all_reduce=auto"
        )
    for num_replicas in config.counts:
        check_shards(config, num_replicas, config.num_train_examples or NUM_TRAIN_EXAMPLES)


def _check_lists(config):
    """Checks what a benchmark combines; each combination is checked once more by itconfig."""
    _check_range("--repeats", config.repeats, 2, 10_000)
    if config.command == "benchmark" and set(config.strategies) == {"single"}:
        for count in config.device_counts:
            if count > 1:
                raise ConfigError(
                    f"--num_devices={count} with --strategies=single — single runs on one"
                    " device; name a strategy with replicas, too"
                )
    choices = {"models": MODEL_NAMES, "precisions": PRECISIONS}
    for name in ("models", "precisions", "device_counts", "global_batch_sizes"):
        flag, values = "--" + name.replace("device_counts", "num_devices"), getattr(config, name)
        for value in values:
            if name in choices:
                check_choice(flag, value, choices[name])
            else:
                most = MAX_LOGICAL_DEVICES if flag == "--num_devices" else NUM_TRAIN_EXAMPLES
                _check_range(flag, value, 1, most)
        if len(set(values)) != len(values):
            raise ConfigError(
                f"{flag}={','.join(map(str, values))} — different values are required; give"
                " each one once"
            )


def _check_command(config):
    if config.batch_norm == "sync":
        raise ConfigError(
            "--batch_norm=sync — statistics of the global batch are not available yet;"
            " use --batch_norm=average"
        )
    reads_no_data = (config.dataset == "synthetic" and "--dataset=synthetic") or (
        config.images and "--images"
    )
    if reads_no_data and (config.data_dir or config.allow_unverified_data):
        flag = "--data_dir" if config.data_dir else "--allow_unverified_data"
        raise ConfigError(
            f"{flag} with {reads_no_data} — no data set is read then; leave one of them out"
        )
    if config.overwrite and config.force_resume:
        raise ConfigError(
            "--overwrite with --force_resume — to start anew or to go on, one of them is"
            " required; leave the other out"
        )
    if config.command == "report" and not config.directories:
        raise ConfigError(
            "report without a directory — at least one run is required; for example: report runs/*"
        )
    if config.command == "launch" and config.strategy != "multi_worker":
        raise ConfigError(
            f"--strategy={config.strategy} with launch — multi_worker is required, whose workers it"
            " starts; leave the flag out"
        )
    if config.command in ("evaluate", "predict") and not config.run:
        raise ConfigError(
            f"{config.command} without --run — the directory of a training is required;"
            " for example --run=runs/NAME"
        )
    if config.command in ON_SEVERAL and len(set(config.strategies)) != len(config.strategies):
        raise ConfigError(
            f"--strategies={','.join(config.strategies)} — different names are required;"
            " name each strategy once"
        )
    if config.command == "doctor" and "multi_worker" in config.strategies:
        raise ConfigError(
            f"--strategies={','.join(config.strategies)} with doctor — one of"
            f" {', '.join(ON_ONE_MACHINE)} is required, for doctor looks at one machine; leave"
            " multi_worker out"
        )
    if config.command == "compare" and len(config.strategies) < 2:
        raise ConfigError(
            f"--strategies={','.join(config.strategies)} — at least two strategies are required;"
            f" choose from {', '.join(STRATEGY_NAMES)}"
        )


def check_shards(config: "Config", num_replicas: int, num_train_examples: int) -> None:
    """Checks that every replica gets an example of every batch, the last one included.

    A replica without examples has no BatchNorm statistics: its weights become NaN, and no error
    tells of it. So it is refused by arithmetic, before the first step.

    Raises:
        ConfigError: some replica would get nothing, or an epoch would have no step.
    """
    size = config.global_batch_size
    if size < num_replicas:
        raise ConfigError(
            f"--global_batch_size={size} is smaller than the number of replicas, {num_replicas}"
            f" — each needs at least one example; use {num_replicas} or more"
        )
    rest = num_train_examples % size
    _check_has_step(config, size, num_train_examples)
    if config.last_batch == "keep" and 0 < rest < num_replicas:
        raise ConfigError(
            f"--global_batch_size={size} leaves {rest} of {num_train_examples} training examples"
            f" for the last batch — each of {num_replicas} replicas needs at least one;"
            " use --last_batch=drop or another batch size"
        )


def check_choice(flag: str, value: str, choices) -> None:
    """Raises `ConfigError`, listing the choices, unless `value` is one of them."""
    if value not in choices:
        shown = f"{value!r}" if flag == "COMMAND" else f"{flag}={value}"
        raise ConfigError(f"{shown} — one of {', '.join(choices)} is required; see --help")


def _check_range(flag: str, value: float | None, low: float, high: float | None) -> None:
    if value is None or low <= value <= (value if high is None else high):
        return
    bounds = f"{low} or more" if high is None else f"{low} to {high}"
    raise ConfigError(f"{flag}={value} — {bounds} is required; choose another number")
