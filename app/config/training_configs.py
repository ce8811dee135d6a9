"""Defines the options of the command `train`."""

import dataclasses
from typing import Any, ClassVar

from app.config import constraints, split_constraints, split_numbers
from app.config.base_config import Config
from app.config.distribution_options import (
    AllReduceOptions,
    BatchOptions,
    StrategyOptions,
    WorkerOptions,
)
from app.config.fault import Fault
from app.config.model_options import (
    ComputationOptions,
    Hyperparameters,
    ModelOptions,
    SubsetOptions,
)
from app.config.names import (
    CLUSTER,
    MULTI_WORKER,
    NUM_TRAIN_EXAMPLES,
    SINGLE,
)
from app.config.option import option, options_of, same_option
from app.config.run_options import (
    InjectOptions,
    OutputOptions,
    ResumeOptions,
    SavingOptions,
    StepVerificationOptions,
    VerbosityOptions,
)
from app.config.split_numbers import OPTIONS_OF_SOME, has_option
from app.config.split_options import SplitOptions
from app.runtime.errors import ConfigError


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainingOptions(
    ModelOptions,
    SubsetOptions,
    AllReduceOptions,
    BatchOptions,
    SplitOptions,
    Hyperparameters,
    ComputationOptions,
    OutputOptions,
    VerbosityOptions,
):
    """The options of every command that trains one model."""

    def check_training(self) -> None:
        """Checks combinations of options of a training.

        Raises:
            ConfigError: two options contradict each other.
        """
        constraints.check_dataset(self)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainConfig(
    StrategyOptions,
    TrainingOptions,
    SavingOptions,
    ResumeOptions,
    InjectOptions,
    StepVerificationOptions,
    Config,
):
    """The options of `train`."""

    num_workers: int | None = same_option(
        WorkerOptions,
        "num_workers",
        default=None,
        help="Number of worker processes of multi_worker. Without TF_CONFIG and outside of srun,"
        " they are started on this machine. Default: those of the cluster, or 2.",
    )
    max_restarts: int = option(
        3,
        "How many times all local workers are restarted after a failure.",
        CLUSTER,
        metavar="N",
        low=0,
        high=1000,
    )

    command: ClassVar[str] = "train"
    summary: ClassVar[str] = "trains a model; writes history, plots and checkpoints"
    examples: ClassVar[tuple[str, ...]] = (
        "--strategy=manual --device=cpu --num_devices=2 --epochs=3",
        "--recipe=fast --epochs=1 --out=runs/first",
        "--strategy=mirrored --num_gpus=2 --model=resnet18",
        "--strategy=multi_worker --num_workers=2 --device=cpu --epochs=1",
        "--strategy=pipeline --num_devices=2 --micro_batches=8",
        "--strategy=sharded --num_devices=2 --shard=gradients",
    )

    @property
    def num_devices_of_all_workers(self) -> int | None:
        """The total number of devices; None if it depends on the machine or the cluster."""
        if not self.has_workers:
            return self.num_devices_asked
        each = self.num_devices_asked
        return each and self.num_workers and each * self.num_workers

    def check(self) -> None:
        """Checks combinations of options."""
        names = (self.strategy,)
        constraints.check_devices(self)
        constraints.check_single("--strategy", names, self.num_devices or self.num_gpus)
        constraints.check_workers(
            self.has_workers,
            names,
            start_timeout_sec=(self.start_timeout_sec, TrainConfig.start_timeout_sec),
            num_workers=(self.num_workers, None),
            max_restarts=(self.max_restarts, TrainConfig.max_restarts),
        )
        constraints.check_all_reduce(self, names, self.device)
        split_constraints.check_options_of_some(self, names)
        split_constraints.check_sync_batch_norm(self.batch_norm, self, jit_compile=self.jit_compile)
        self.check_training()
        self.check_verified_steps()
        number = self.num_devices_of_all_workers
        self.check_fault(number)
        self.check_shards(number)

    def check_fault(self, num_devices: int | None) -> None:
        """Checks that the fault, if any, can be injected.

        Args:
            num_devices: devices of all workers; None if it depends on the machine or the cluster.

        Raises:
            ConfigError: the strategy does not support the fault.
        """

        def count(strategy: str, fault: Fault) -> int | None:
            return num_devices and num_faulty(strategy, self, num_devices, fault)

        constraints.check_fault(self.fault, f"--inject={self.inject}", (self.strategy,), count)

    def check_verified_steps(self) -> None:
        """Checks that the steps to verify can be verified.

        Raises:
            ConfigError: they cannot.
        """
        if self.verify_every == 0 and self.on_mismatch != "stop":
            raise ConfigError(
                f"--on_mismatch={self.on_mismatch} has no effect with --verify_every=0, which"
                " verifies no step; leave one of them out"
            )

    def check_shards(self, num_devices: int | None, num_train_examples: int | None = None) -> None:
        """Checks the split over devices, and that no shard of a batch is empty.

        Args:
            num_devices: devices of all workers; None if it depends on the machine or the cluster.
            num_train_examples: training examples of the dataset; None for the number from the
                options.

        Raises:
            ConfigError: numbers do not fit together, a shard would be empty, or an epoch would have
                no step.
        """
        if num_devices:
            split_constraints.check_split(self.strategy, self, num_devices)
        # The smallest possible number of replicas.
        number = num_devices or len(self.shard_weights) or self.model_parallel or 1
        split = self.strategy, self, number
        of_options = self.num_train_examples or NUM_TRAIN_EXAMPLES
        split_constraints.check_parts(*split, self.global_batch_size)
        split_constraints.check_full_batch(*split, self.global_batch_size)
        constraints.check_shards(
            global_batch_size=self.global_batch_size,
            last_batch=self.last_batch,
            num_replicas=split_numbers.num_replicas(*split),
            num_train_examples=num_train_examples or of_options,
            fewest=split_numbers.fewest_examples(*split),
            shards=split_constraints.name_shards(*split),
        )

    def result_fields(self) -> dict[str, Any]:
        """Returns the fields that affect the result of the training, without paths and display."""
        return super().result_fields() | self.inject_field()


def num_faulty(strategy: str, options: SplitOptions, num_devices: int, fault: Fault) -> int:
    """Returns the number of the units that a fault counts: shards, copies of the weights, etc."""
    num_replicas = split_numbers.num_replicas(strategy, options, num_devices)
    numbers = {
        "parts": 1,
        "replicas": num_replicas,
        "shards": split_numbers.num_shards(strategy, options, num_devices),
        "copies": split_numbers.num_copies(strategy, options, num_devices),
        "micro-batches": split_numbers.shards_per_replica(strategy, options),
        "devices of a replica": num_devices // max(1, num_replicas),
    }
    return numbers[fault.counts]


def training_config(config: Config, strategy: str, **options: Any) -> TrainConfig:
    """Returns the configuration of a training with one strategy and a command's options.

    Options that the strategy does not have get their defaults. `single` has one device with all
    cores.

    Args:
        config: config of the command; options that `train` does not have, and lists of values to
            try, are ignored.
        strategy: strategy of the training.
        **options: values that replace the command's.
    """
    given = {
        each.name: getattr(config, each.name)
        for each in options_of(TrainConfig)
        if hasattr(config, each.name)
        and (each.is_list or not isinstance(getattr(config, each.name), tuple))
    }
    given = {name: value for name, value in given.items() if value is not None} | options
    without = {name for name in OPTIONS_OF_SOME if not has_option(strategy, name)}
    if strategy == SINGLE:
        without |= {"num_devices", "num_gpus"}
    if strategy != MULTI_WORKER:
        without.add("num_workers")
    given = {name: value for name, value in given.items() if name not in without}
    return TrainConfig(**{**given, "strategy": strategy})
