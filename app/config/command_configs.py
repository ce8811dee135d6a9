"""What a command was asked to do: one frozen object, checked before anything is loaded."""

import dataclasses

from app.config.constraints import validate
from app.config.fault import Fault
from app.config.options import (
    COMMANDS,
    DEFAULT_COUNTS,
    DEFAULT_LOGICAL_CPUS,
    OF_SEVERAL_DEVICES,
    ON_ONE_MACHINE,
    ON_SEVERAL,
    OWN_DEFAULTS,
    PLANNED_PER_DEVICE,
    RESULT_FIELDS,
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
    bucket_mib: float | None = None
    communication_dtype: str = "float32"
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

    num_workers: int = 2
    max_restarts: int = 3
    start_timeout_sec: int = 300
    devices_per_worker: int | None = None
    planned_global_batch_size: int | None = None  # What --global_batch_size is to plan.
    bandwidth_gbps: float = 10.0
    latency_us: float = 50.0
    # One direction of PCI Express 4.0: 16 lanes at 16 GT/s, 128b/130b. NVIDIA's data sheets of A100
    # and H100 have 2400 and 3600 for NVLink.
    device_bandwidth_gbps: float = 252.0

    strategies: tuple[str, ...] = ON_ONE_MACHINE
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
    probe: bool = False
    experiment: str = ""  # The word after `demo`.
    directories: tuple[str, ...] = ()  # The words after `report`.

    def __post_init__(self):
        validate(self)

    @classmethod
    def of(cls, command: str = "train", **options) -> "Config":
        """Returns what the command line makes of these options.

        A few commands have defaults of their own, which `Config` by itself does not know.

        Args:
            command: its name.
            **options: as the flags are called; `experiment` and `directories` for the words after
                `demo` and `report`.

        Raises:
            ConfigError: a value that cannot be meant, or two that contradict each other.
        """
        options = {**OWN_DEFAULTS.get(command, {}), **options}
        if command == "plan" and "global_batch_size" in options:
            options["planned_global_batch_size"] = options.pop("global_batch_size")
        return cls(command=command, **options)

    @property
    def num_devices_asked(self) -> int | None:
        """How many devices the flags ask for, of each worker; None where the machine decides."""
        if self.strategy == "single" and self.command not in ON_SEVERAL:
            return 1
        default = DEFAULT_LOGICAL_CPUS if self.device == "cpu" else None
        if self.has_workers:
            default = 1 if self.device == "cpu" or self.command in ON_SEVERAL else None
        return self.num_devices or self.num_gpus or default

    @property
    def num_replicas_asked(self) -> int | None:
        """How many replicas the flags ask for in all, None where machine or cluster decides."""
        if not self.has_workers:
            return self.num_devices_asked
        if self.command == "train":
            return None  # The cluster says how many workers there are.
        return self.num_devices_asked and self.num_devices_asked * self.num_workers

    @property
    def has_workers(self) -> bool:
        """Whether several processes train together."""
        names = self.strategies if self.command in ON_SEVERAL else (self.strategy,)
        return "multi_worker" in names

    @property
    def plans_cluster(self) -> bool:
        """Whether a plan is one of several machines, or of machines that are not this one."""
        return self.num_workers > 1 or self.devices_per_worker is not None

    @property
    def num_devices_planned(self) -> int:
        """Devices of each machine of a plan."""
        default = 1 if self.plans_cluster else DEFAULT_LOGICAL_CPUS
        return self.devices_per_worker or self.num_devices_asked or default

    @property
    def planned_batch_size(self) -> int:
        """The global batch of a plan: the default would leave devices of a cluster without."""
        num_replicas = self.num_workers * self.num_devices_planned
        least = PLANNED_PER_DEVICE * num_replicas if self.plans_cluster else 0
        return self.planned_global_batch_size or max(Config.global_batch_size, least)

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

        `single` has one device, with all cores, and nothing to exchange. Beside `multi_worker`
        the others have as many replicas on one machine as its workers have together.
        """
        if strategy == "single":
            options |= {name: getattr(Config, name) for name in OF_SEVERAL_DEVICES}
        elif self.has_workers and self.command in ON_SEVERAL and self.command != "benchmark":
            name = "num_gpus" if self.num_gpus else "num_devices"
            own = strategy == "multi_worker"
            number = self.num_devices_asked if own else self.num_replicas_asked
            options = {name: number, "num_devices": number, **options}
        return dataclasses.replace(self, command="train", strategy=strategy, **options)

    def train_flags(self) -> list[str]:
        """Returns the flags of a `train` that does this, but for `--out`."""
        return [
            f"--{field.name}={getattr(self, field.name)}"
            for field in dataclasses.fields(self)
            if field.name in COMMANDS["train"] - {"out"}
            and getattr(self, field.name) != field.default
        ]

    def result_fields(self) -> dict:
        """Returns what the result of a training depends on, without paths and display."""
        fields = {name: getattr(self, name) for name in RESULT_FIELDS}
        return fields | {"inject": self.fault.spec if self.fault else None}
