"""Defines the options of the command `plan`."""

import dataclasses
from typing import ClassVar

from app.config import constraints, split_constraints
from app.config.base_config import Config
from app.config.distribution_options import (
    AllReduceOptions,
    BatchOptions,
    DeviceOptions,
    StrategyOptions,
    WorkerOptions,
)
from app.config.model_options import (
    ComputationOptions,
    Hyperparameters,
    ModelOptions,
    SubsetOptions,
)
from app.config.names import (
    DEFAULT_LOGICAL_CPUS,
    MAX_LOGICAL_DEVICES,
    NUM_TRAIN_EXAMPLES,
    PLAN,
)
from app.config.option import option, same_option
from app.config.run_options import VerbosityOptions
from app.config.split_numbers import has_option
from app.config.split_options import SplitOptions
from app.config.training_configs import TrainConfig, training_config
from app.runtime.errors import ConfigError

_MAX_PLANNED_WORKERS = 10_000
_MAX_PLANNED_BATCH_SIZE = 10_000_000
_PLANNED_PER_DEVICE = 32  # Default number of examples per device of a planned cluster.


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlanConfig(ModelOptions, DeviceOptions, VerbosityOptions, Config):
    """The options of `plan`."""

    command: ClassVar[str] = "plan"
    summary: ClassVar[str] = "predicts a training: steps, shards, all-reduce, memory, time"
    first_group: ClassVar[str] = PLAN
    examples: ClassVar[tuple[str, ...]] = (
        "--num_gpus=4 --model=resnet18 --global_batch_size=1024",
        "--num_devices=2 --epochs=10 --probe",
        "--num_workers=64 --devices_per_worker=8",
        "--strategy=pipeline --num_devices=4 --micro_batches=8",
    )

    strategy: str = same_option(
        StrategyOptions,
        "strategy",
        help="Distribution strategy: manual stands for all that split only the batch.",
        choices=("manual", "sharded", "pipeline", "tensor"),
    )
    model_parallel: int | None = same_option(SplitOptions, "model_parallel")
    micro_batches: int = same_option(SplitOptions, "micro_batches")
    schedule: str = same_option(SplitOptions, "schedule")
    recompute: bool = same_option(SplitOptions, "recompute")
    pipeline_cuts: tuple[str, ...] = same_option(SplitOptions, "pipeline_cuts")
    shard: str = same_option(SplitOptions, "shard")

    num_train_examples: int | None = same_option(SubsetOptions, "num_train_examples")
    communication_dtype: str = same_option(AllReduceOptions, "communication_dtype")
    last_batch: str = same_option(BatchOptions, "last_batch")
    global_batch_size: int | None = same_option(
        Hyperparameters,
        "global_batch_size",
        default=None,
        help=f"Examples in a step, over all replicas; default {Hyperparameters.global_batch_size},"
        f" in a cluster at least {_PLANNED_PER_DEVICE} on each device.",
        high=_MAX_PLANNED_BATCH_SIZE,
    )
    learning_rate: float | None = same_option(Hyperparameters, "learning_rate")
    epochs: int = same_option(Hyperparameters, "epochs")
    precision: str = same_option(ComputationOptions, "precision")
    jit_compile: bool = same_option(ComputationOptions, "jit_compile")
    probe: bool = option(
        False,
        "Measure the time and memory of a few steps on this machine; for more than 8 "
        "devices, the time is extrapolated.",
        PLAN,
    )
    num_workers: int = same_option(
        WorkerOptions,
        "num_workers",
        default=1,
        help="Number of machines.",
        high=_MAX_PLANNED_WORKERS,
    )
    devices_per_worker: int | None = option(
        None,
        "Number of devices in each machine.",
        PLAN,
        metavar="N",
        low=1,
        high=MAX_LOGICAL_DEVICES,
    )
    bandwidth_gbps: float = option(
        10.0,
        "Network bandwidth of a machine in one direction, in Gbit/s.",
        PLAN,
        metavar="X",
        low=0.001,
        high=1_000_000,
    )
    latency_us: float = option(
        50.0,
        "Latency of a message between machines, in microseconds.",
        PLAN,
        metavar="X",
        low=0,
        high=1_000_000,
    )
    # One direction of PCI Express 4.0: 16 lanes at 16 GT/s, 128b/130b. NVIDIA's data sheets of A100
    # and H100 have 2400 and 3600 for NVLink.
    device_bandwidth_gbps: float = option(
        252.0,
        "Bandwidth of the links within a machine: 252 is PCIe 4.0 × 16, 2400 NVLink 3, 3600"
        " NVLink 4.",
        PLAN,
        metavar="X",
        low=0.001,
        high=1_000_000,
    )

    @property
    def plans_cluster(self) -> bool:
        """Whether the plan is for several machines, or for machines other than this one."""
        return self.num_workers > 1 or self.devices_per_worker is not None

    @property
    def num_devices_planned(self) -> int:
        """The number of devices of each machine."""
        default = 1 if self.plans_cluster else DEFAULT_LOGICAL_CPUS
        return self.devices_per_worker or self.num_devices_asked or default

    @property
    def is_split(self) -> bool:
        """Whether the strategy splits more than the batch."""
        return not has_option(self.strategy, "all_reduce")

    def for_training(self) -> TrainConfig:
        """Returns the configuration of a training on one machine, with a valid batch size."""
        options = {"num_devices": self.num_devices_planned, "num_gpus": None}
        batch = min(self.planned_batch_size, NUM_TRAIN_EXAMPLES)
        return training_config(
            self, self.strategy, global_batch_size=batch, last_batch="drop", **options
        )

    @property
    def planned_batch_size(self) -> int:
        """The global batch size; the default gives every device of a cluster examples."""
        num_replicas = self.num_workers * self.num_devices_planned
        least = _PLANNED_PER_DEVICE * num_replicas if self.plans_cluster else 0
        return self.global_batch_size or max(Hyperparameters.global_batch_size, least)

    def check(self) -> None:
        """Checks combinations of options."""
        constraints.check_devices(self)
        split_constraints.check_options_of_some(self, (self.strategy,))
        if self.is_split:
            self._check_split()
        num_devices = self.num_workers * self.num_devices_planned
        if self.planned_batch_size < num_devices:
            raise ConfigError(
                f"--global_batch_size must be at least the number of devices, {num_devices}, got"
                f" {self.planned_batch_size}"
            )
        constraints.check_has_step(
            self.planned_batch_size,
            self.last_batch,
            self.num_train_examples or NUM_TRAIN_EXAMPLES,
        )

    def _check_split(self) -> None:
        """Checks the options of a strategy that splits more than the batch."""
        if self.plans_cluster:
            raise ConfigError(
                f"--strategy={self.strategy} is planned for one machine; use --num_devices, or"
                " --strategy=manual for a cluster"
            )
        self.for_training().check_shards(self.num_devices_planned)
