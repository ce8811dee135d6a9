"""What a command was asked to do: one frozen object, checked before anything is loaded."""

import dataclasses

from app.fault import Fault
from app.options import (
    DEFAULT_COUNTS,
    DEFAULT_LOGICAL_CPUS,
    OF_SEVERAL_DEVICES,
    ON_SEVERAL,
    RESULT_FIELDS,
    STRATEGY_NAMES,
)
from app.validation import validate


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
        validate(self)

    @property
    def num_replicas_asked(self) -> int | None:
        """How many replicas the flags ask for, None where the machine decides."""
        if self.strategy == "single" and self.command not in ON_SEVERAL:
            return 1
        default = DEFAULT_LOGICAL_CPUS if self.device == "cpu" else None
        return self.num_devices or self.num_gpus or default

    @property
    def counts(self) -> tuple[int, ...]:
        """The numbers of devices that a command measures."""
        return self.device_counts or DEFAULT_COUNTS.get(self.command, ())

    @property
    def fault(self) -> Fault | None:
        """What `--inject` names."""
        return Fault.parse(self.inject) if self.inject else None

    def for_training(self, strategy: str, **options) -> "Config":
        """Returns the configuration of a training with one strategy, all else as it is here.

        `single` has one device, with all cores, and nothing to exchange.
        """
        if strategy == "single":
            options |= {name: getattr(Config, name) for name in OF_SEVERAL_DEVICES}
        return dataclasses.replace(self, command="train", strategy=strategy, **options)

    def result_fields(self) -> dict:
        """Returns what the result of a training depends on, without paths and display."""
        fields = {name: getattr(self, name) for name in RESULT_FIELDS}
        return fields | {"inject": self.fault.spec if self.fault else None}
