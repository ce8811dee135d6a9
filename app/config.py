"""What a command was asked to do: one frozen object, checked before anything is loaded."""

import dataclasses

from app.errors import ConfigError
from app.fault import MIN_STEPS, Fault

# What defines these names imports TensorFlow, which a flag error must not wait for.
# A test holds both equal.
MODEL_NAMES = ("lenet", "resnet18")
RECIPE_NAMES = ("d2l", "fast")
STRATEGY_NAMES = ("single", "manual", "mirrored")
ALL_REDUCE_NAMES = {
    "single": (),
    "manual": ("sum_on_one", "ring", "tree", "all_to_all"),
    "mirrored": ("sum_on_one", "nccl", "hierarchical", "ring"),
}
PRECISIONS = ("float32", "mixed_bfloat16", "mixed_float16")

NUM_TRAIN_EXAMPLES = 60_000
MAX_LOGICAL_DEVICES = 64
_LARGEST_FLOAT32 = 3.4e38
_LARGEST_BUCKET_MB = 4096
DEFAULT_LOGICAL_CPUS = 2

_DEFAULT_COUNTS = {"benchmark": (1, 2), "explain": (2, 3, 4)}

_DEVICE_OPTIONS = {"num_gpus", "device", "num_devices"}
_EXCHANGE_OPTIONS = ("all_reduce", "bucket_mb", "exchange_dtype")
# What means nothing to a training on one device.
_OF_SEVERAL_DEVICES = ("num_devices", "num_gpus", *_EXCHANGE_OPTIONS)
_DATA_OPTIONS = {"data_dir", "allow_unverified_data"}
_TRAINING_OPTIONS = {
    *("model", "dataset", "num_train_examples", "recipe", "all_reduce", "batch_norm"),
    *("last_batch", "global_batch_size", "learning_rate", "epochs", "seed", "deterministic"),
    *("bucket_mb", "exchange_dtype", "precision", "jit_compile"),
    *("out", "overwrite", "verbosity"),
    *_DEVICE_OPTIONS,
    *_DATA_OPTIONS,
}
_SAVING_OPTIONS = {"checkpoint_every", "stall_timeout_sec"}
_READING_OPTIONS = {
    *("run", "checkpoint", "strategy", "verbosity"),
    *_DEVICE_OPTIONS,
    *_DATA_OPTIONS,
}

# Every command, with the options that mean something to it: any other is refused, not ignored.
COMMANDS = {
    "train": {
        *("strategy", "inject", "steps_per_call", "force_resume"),
        *_TRAINING_OPTIONS,
        *_SAVING_OPTIONS,
    },
    "evaluate": _READING_OPTIONS,
    "predict": {"images", *_READING_OPTIONS},
    "compare": {"strategies", "steps_per_call", *_TRAINING_OPTIONS, *_SAVING_OPTIONS},
    "benchmark": {
        *("models", "device_counts", "global_batch_sizes", "precisions", "repeats"),
        *("strategies", "dataset", "recipe", "device", "all_reduce", "bucket_mb"),
        *("exchange_dtype", "jit_compile", "deterministic", "seed"),
        *("num_train_examples", "out", "overwrite", "verbosity", *_DATA_OPTIONS),
    },
    "explain": {
        *("strategy", "device_counts", "repeats"),
        *(_TRAINING_OPTIONS - {"num_devices", "num_gpus", "epochs", "batch_norm", "last_batch"}),
    },
    "verify": {"strategies", "steps", "inject", "keep_traces", *_TRAINING_OPTIONS},
}

# Commands that take several strategies instead of one.
_ON_SEVERAL = ("compare", "verify", "benchmark")

# What a run's result depends on. Another value of one of these makes it another run.
RESULT_FIELDS = (
    *("model", "dataset", "num_train_examples", "recipe", "strategy", "all_reduce", "batch_norm"),
    *("last_batch", "global_batch_size", "learning_rate", "epochs", "seed", "deterministic"),
    *("bucket_mb", "exchange_dtype", "precision", "jit_compile", "inject"),
)


@dataclasses.dataclass(frozen=True)
class Config:
    """A command with its options; the defaults of the flags are the defaults here.

    Raises:
        ConfigError: a value that cannot be meant, or two that contradict each other.
    """

    command: str = "train"

    model: str = "lenet"
    dataset: str = "auto"
    data_dir: str | None = None
    allow_unverified_data: bool = False
    num_train_examples: int | None = None
    recipe: str = "d2l"

    strategy: str = "manual"
    num_gpus: int | None = None
    device: str = "auto"
    num_devices: int | None = None
    all_reduce: str = "auto"
    bucket_mb: float = 0.0
    exchange_dtype: str = "float32"
    batch_norm: str = "average"
    last_batch: str = "keep"

    global_batch_size: int = 256
    learning_rate: float | None = None
    epochs: int = 10
    seed: int = 0

    precision: str = "float32"
    jit_compile: bool = False
    steps_per_call: int | None = None
    deterministic: bool = False

    out: str | None = None
    overwrite: bool = False
    force_resume: bool = False
    checkpoint_every: int | None = None
    stall_timeout_sec: int = 1800
    verbosity: int = -1

    strategies: tuple[str, ...] = STRATEGY_NAMES
    steps: int = 20
    inject: str | None = None
    keep_traces: bool = False
    models: tuple[str, ...] = ("lenet",)
    device_counts: tuple[int, ...] = ()  # What --num_devices=1,2 is to commands that take several.
    global_batch_sizes: tuple[int, ...] = (256,)
    precisions: tuple[str, ...] = ("float32",)
    repeats: int = 10
    run: str | None = None
    checkpoint: str = "newest"
    images: tuple[str, ...] = ()

    def __post_init__(self):
        self._check_names()
        self._check_numbers()
        self._check_devices()
        self._check_command()
        self._check_proof()
        self._check_lists()
        if self.command == "explain":
            self._check_explain()
        if self.command in ("train", "compare", "verify"):
            num_train_examples = self.num_train_examples or NUM_TRAIN_EXAMPLES
            check_shards(self, self.num_replicas_asked or 1, num_train_examples)

    @property
    def num_replicas_asked(self) -> int | None:
        """How many replicas the flags ask for, None where the machine decides."""
        if self.strategy == "single" and self.command not in _ON_SEVERAL:
            return 1
        default = DEFAULT_LOGICAL_CPUS if self.device == "cpu" else None
        return self.num_devices or self.num_gpus or default

    @property
    def counts(self) -> tuple[int, ...]:
        """The numbers of devices that a command measures."""
        return self.device_counts or _DEFAULT_COUNTS.get(self.command, ())

    @property
    def fault(self) -> Fault | None:
        """What `--inject` names."""
        return Fault.parse(self.inject) if self.inject else None

    def for_training(self, strategy: str, **options) -> "Config":
        """Returns the configuration of a training with one strategy, all else as it is here.

        `single` has one device, with all cores, and nothing to exchange.
        """
        if strategy == "single":
            options |= {name: getattr(Config, name) for name in _OF_SEVERAL_DEVICES}
        return dataclasses.replace(self, command="train", strategy=strategy, **options)

    def result_fields(self) -> dict:
        """Returns what the result of a training depends on, without paths and display."""
        fields = {name: getattr(self, name) for name in RESULT_FIELDS}
        return fields | {"inject": self.fault.spec if self.fault else None}

    def _check_names(self):
        check_choice("COMMAND", self.command, COMMANDS)
        check_choice("--model", self.model, MODEL_NAMES)
        check_choice("--dataset", self.dataset, ("auto", "fashion_mnist", "synthetic"))
        check_choice("--recipe", self.recipe, RECIPE_NAMES)
        check_choice("--strategy", self.strategy, STRATEGY_NAMES)
        check_choice("--device", self.device, ("auto", "gpu", "cpu"))
        known = dict.fromkeys(name for names in ALL_REDUCE_NAMES.values() for name in names)
        check_choice("--all_reduce", self.all_reduce, ("auto", *known))
        check_choice("--exchange_dtype", self.exchange_dtype, ("float32", "bfloat16"))
        check_choice("--precision", self.precision, PRECISIONS)
        check_choice("--batch_norm", self.batch_norm, ("average", "sync"))
        check_choice("--last_batch", self.last_batch, ("keep", "drop"))
        check_choice("--checkpoint", self.checkpoint, ("newest", "best"))
        for strategy in self.strategies:
            if strategy not in STRATEGY_NAMES:
                raise ConfigError(
                    f"--strategies={strategy} in {','.join(self.strategies)!r} — one of"
                    f" {', '.join(STRATEGY_NAMES)} is required; see --help"
                )

    def _check_numbers(self):
        _check_range("--num_devices", self.num_devices, 1, None)
        _check_range("--num_gpus", self.num_gpus, 1, None)
        _check_range("--global_batch_size", self.global_batch_size, 1, NUM_TRAIN_EXAMPLES)
        _check_range("--epochs", self.epochs, 1, 100_000)
        _check_range("--seed", self.seed, 0, 2**32 - 1)
        _check_range("--verbosity", self.verbosity, -1, 1)
        _check_range("--num_train_examples", self.num_train_examples, 1, NUM_TRAIN_EXAMPLES)
        _check_range("--steps_per_call", self.steps_per_call, 1, 1_000_000)
        _check_range("--checkpoint_every", self.checkpoint_every, 1, 1_000_000_000)
        _check_range("--stall_timeout_sec", self.stall_timeout_sec, 0, 1_000_000)
        if not 0 <= self.bucket_mb <= _LARGEST_BUCKET_MB:
            raise ConfigError(
                f"--bucket_mb={self.bucket_mb} — 0 to {_LARGEST_BUCKET_MB} is required; 0 exchanges"
                " each gradient by itself"
            )
        if self.learning_rate is not None and not (0 < self.learning_rate <= _LARGEST_FLOAT32):
            raise ConfigError(
                f"--learning_rate={self.learning_rate} — a finite number above 0 is required;"
                " leave it out for the recipe's own"
            )

    def _check_devices(self):
        if self.num_gpus and self.device == "cpu":
            raise ConfigError(
                f"--num_gpus={self.num_gpus} with --device=cpu — one or the other is required;"
                f" use --device=cpu --num_devices={self.num_gpus} for logical CPU devices"
            )
        if self.num_gpus and self.num_devices not in (None, self.num_gpus):
            raise ConfigError(
                f"--num_gpus={self.num_gpus} with --num_devices={self.num_devices}"
                " — both count the replicas; give one of them"
            )
        num_devices = self.num_devices or self.num_gpus or 1
        if num_devices > MAX_LOGICAL_DEVICES:
            raise ConfigError(
                f"{num_devices} devices asked for — at most {MAX_LOGICAL_DEVICES} on one machine;"
                " use fewer"
            )
        several = self.command in _ON_SEVERAL
        names = self.strategies if several else (self.strategy,)
        if set(names) == {"single"} and num_devices > 1:
            flag = "strategies" if several else "strategy"
            raise ConfigError(
                f"--{flag}=single with {num_devices} devices — single runs on one device;"
                f" use --{flag}=manual or --{flag}=mirrored"
            )
        self._check_exchange(names)

    def _check_exchange(self, strategies):
        """Refuses an exchange that a strategy does not have, or that these devices cannot do."""
        parallel = [name for name in strategies if name != "single"]
        for flag in _EXCHANGE_OPTIONS:
            value = getattr(self, flag)
            if value == getattr(Config, flag):
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
        if self.all_reduce == "nccl" and self.device == "cpu":
            raise ConfigError(
                "--all_reduce=nccl with --device=cpu — NCCL connects GPUs; use --all_reduce=auto"
            )

    def _check_proof(self):
        _check_range("--steps", self.steps, 1, 100_000)
        if self.command == "verify" and self.precision == "mixed_float16":
            raise ConfigError(
                "--precision=mixed_float16 with verify — a precision that needs no loss scale is"
                " required; use --precision=mixed_bfloat16 or float32"
            )
        fault = self.fault
        if fault is None:
            return
        trained = self.strategies if self.command == "verify" else (self.strategy,)
        if fault.strategy not in (None, *trained):
            raise ConfigError(
                f"--inject={self.inject} spoils {fault.strategy}, which is not trained — one of"
                f" {', '.join(trained)} is required; name it or leave strategy= out"
            )
        if fault.parameters.get("step", 0) > self.steps and self.command == "verify":
            raise ConfigError(
                f"--inject={self.inject} with --steps={self.steps} — a step that is made is"
                f" required; use --steps={fault.parameters['step']} or more"
            )
        if self.command == "verify" and fault.name == "slow_replica" and self.steps < MIN_STEPS:
            raise ConfigError(
                f"--inject={self.inject} with --steps={self.steps} — {MIN_STEPS} steps are required"
                f" to tell a slow replica from chance; use --steps={MIN_STEPS} or more"
            )
        if fault.strategy == "single" or set(trained) == {"single"}:
            fault.check_replicas(1)
        elif self.num_replicas_asked:
            fault.check_replicas(self.num_replicas_asked)

    def _check_explain(self):
        """Checks what `explain` measures: rising numbers of devices, each with full shards."""
        shown = ",".join(map(str, self.counts))
        if self.strategy == "single" or list(self.counts) != sorted({*self.counts} - {1}):
            raise ConfigError(
                f"--strategy={self.strategy} --num_devices={shown} with explain — a strategy with"
                " replicas and rising numbers of devices above 1 are required: the first is"
                " explained, the last of three or more predicted; for example"
                " --strategy=manual --num_devices=2,3,4"
            )
        if self.all_reduce == "hierarchical":
            raise ConfigError(
                "--all_reduce=hierarchical with explain — an all-reduce whose cost is known is"
                " required; use --all_reduce=auto"
            )
        for num_replicas in self.counts:
            check_shards(self, num_replicas, self.num_train_examples or NUM_TRAIN_EXAMPLES)

    def _check_lists(self):
        """Checks what a benchmark combines; each combination is checked once more by itself."""
        _check_range("--repeats", self.repeats, 2, 10_000)
        if self.command == "benchmark" and set(self.strategies) == {"single"}:
            for count in self.device_counts:
                if count > 1:
                    raise ConfigError(
                        f"--num_devices={count} with --strategies=single — single runs on one"
                        " device; name a strategy with replicas, too"
                    )
        choices = {"models": MODEL_NAMES, "precisions": PRECISIONS}
        for name in ("models", "precisions", "device_counts", "global_batch_sizes"):
            flag, values = "--" + name.replace("device_counts", "num_devices"), getattr(self, name)
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

    def _check_command(self):
        if self.batch_norm == "sync":
            raise ConfigError(
                "--batch_norm=sync — statistics of the global batch are not available yet;"
                " use --batch_norm=average"
            )
        reads_no_data = (self.dataset == "synthetic" and "--dataset=synthetic") or (
            self.images and "--images"
        )
        if reads_no_data and (self.data_dir or self.allow_unverified_data):
            flag = "--data_dir" if self.data_dir else "--allow_unverified_data"
            raise ConfigError(
                f"{flag} with {reads_no_data} — no data set is read then; leave one of them out"
            )
        if self.overwrite and self.force_resume:
            raise ConfigError(
                "--overwrite with --force_resume — to start anew or to go on, one of them is"
                " required; leave the other out"
            )
        if self.command in ("evaluate", "predict") and not self.run:
            raise ConfigError(
                f"{self.command} without --run — the directory of a training is required;"
                " for example --run=runs/NAME"
            )
        if self.command in _ON_SEVERAL and len(set(self.strategies)) != len(self.strategies):
            raise ConfigError(
                f"--strategies={','.join(self.strategies)} — different names are required;"
                " name each strategy once"
            )
        if self.command == "compare" and len(self.strategies) < 2:
            raise ConfigError(
                f"--strategies={','.join(self.strategies)} — at least two strategies are required;"
                f" choose from {', '.join(STRATEGY_NAMES)}"
            )


def check_shards(config: Config, num_replicas: int, num_train_examples: int) -> None:
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
    if config.last_batch == "drop" and num_train_examples < size:
        raise ConfigError(
            f"--last_batch=drop with {num_train_examples} training examples and"
            f" --global_batch_size={size} — an epoch would have no step; use a smaller batch"
        )
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


def _check_range(flag: str, value: int | None, low: int, high: int | None) -> None:
    if value is None or low <= value <= (value if high is None else high):
        return
    bounds = f"{low} or more" if high is None else f"{low} to {high}"
    raise ConfigError(f"{flag}={value} — {bounds} is required; choose another number")
