"""Defines the options of the commands `benchmark` and `explain`."""

import dataclasses
from typing import Any, ClassVar

from app.config import constraints, split_constraints
from app.config.base_config import Config
from app.config.distribution_options import (
    AllReduceOptions,
    BatchOptions,
    DeviceOptions,
    StrategiesOptions,
    StrategyOptions,
)
from app.config.model_options import (
    ComputationOptions,
    Hyperparameters,
    ModelOptions,
    SubsetOptions,
)
from app.config.names import (
    MEASUREMENT,
    NUM_TRAIN_EXAMPLES,
    ONE_MACHINE_STRATEGIES,
    SINGLE,
)
from app.config.option import option, same_option
from app.config.run_options import OutputOptions, VerbosityOptions
from app.config.split_options import SplitOptions
from app.config.training_configs import TrainConfig, training_config
from app.runtime.errors import ConfigError


@dataclasses.dataclass(frozen=True, kw_only=True)
class BenchmarkConfig(
    StrategiesOptions,
    AllReduceOptions,
    SplitOptions,
    SubsetOptions,
    OutputOptions,
    VerbosityOptions,
    Config,
):
    """The options of `benchmark`."""

    command: ClassVar[str] = "benchmark"
    summary: ClassVar[str] = "measures throughput over strategies, devices and batch sizes"
    first_group: ClassVar[str] = MEASUREMENT
    examples: ClassVar[tuple[str, ...]] = ("--num_devices=1,2,4 --repeats=20",)

    batch_norm: str = same_option(BatchOptions, "batch_norm")
    model: tuple[str, ...] = same_option(
        ModelOptions, "model", default=("lenet",), help="Networks.", metavar="A,B,…"
    )
    recipe: str = same_option(ModelOptions, "recipe")
    num_devices: tuple[int, ...] = same_option(
        DeviceOptions,
        "num_devices",
        default=(1, 2),
        help="Numbers of devices; multi_worker has one worker for each device.",
        metavar="N,M,…",
    )
    device: str = same_option(DeviceOptions, "device")
    global_batch_size: tuple[int, ...] = same_option(
        Hyperparameters,
        "global_batch_size",
        default=(256,),
        help="Examples in a step, over all replicas.",
        metavar="N,M,…",
    )
    precision: tuple[str, ...] = same_option(
        ComputationOptions,
        "precision",
        default=("float32",),
        help="Precisions.",
        metavar="A,B,…",
    )
    jit_compile: bool = same_option(ComputationOptions, "jit_compile")
    deterministic: bool = same_option(ComputationOptions, "deterministic")
    seed: int = same_option(Hyperparameters, "seed")
    repeats: int = option(
        10,
        "Number of rounds; each round times every case once.",
        MEASUREMENT,
        metavar="N",
        low=2,
        high=10_000,
    )

    def for_training(self, strategy: str, **options: Any) -> TrainConfig:
        """Returns the configuration of the training with one of the strategies."""
        return training_config(self, strategy, **options)

    def check(self) -> None:
        """Checks combinations of options."""
        constraints.check_all_reduce(self, self.strategies, self.device)
        split_constraints.check_options_of_some(self, self.strategies)
        constraints.check_dataset(self)
        if self.num_devices != BenchmarkConfig.num_devices:
            constraints.check_single("--strategies", self.strategies, max(self.num_devices))


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExplainConfig(
    ModelOptions,
    SubsetOptions,
    AllReduceOptions,
    SplitOptions,
    ComputationOptions,
    OutputOptions,
    VerbosityOptions,
    Config,
):
    """The options of `explain`."""

    command: ClassVar[str] = "explain"
    summary: ClassVar[str] = "shows one step with its numbers, and where its time is spent"
    first_group: ClassVar[str] = MEASUREMENT
    examples: ClassVar[tuple[str, ...]] = (
        "--num_devices=2,3,4 --all_reduce=ring",
        "--strategy=pipeline --num_devices=4 --micro_batches=8",
    )

    strategy: str = same_option(
        StrategyOptions,
        "strategy",
        help="Distribution strategy.",
        choices=tuple(name for name in ONE_MACHINE_STRATEGIES if name != SINGLE),
    )
    batch_norm: str = same_option(BatchOptions, "batch_norm")
    num_devices: tuple[int, ...] = same_option(
        DeviceOptions,
        "num_devices",
        default=(2, 3, 4),
        help="Increasing numbers of devices: the first is explained, the last of three or more is"
        " predicted.",
        metavar="N,M,…",
        low=2,
    )
    device: str = same_option(DeviceOptions, "device")
    global_batch_size: int = same_option(Hyperparameters, "global_batch_size")
    learning_rate: float | None = same_option(Hyperparameters, "learning_rate")
    seed: int = same_option(Hyperparameters, "seed")
    repeats: int = same_option(BenchmarkConfig, "repeats")

    def for_training(self, **options: Any) -> TrainConfig:
        """Returns the configuration of a training with the strategy."""
        return training_config(self, self.strategy, **options)

    def check(self) -> None:
        """Checks combinations of options."""
        constraints.check_all_reduce(self, (self.strategy,), self.device)
        split_constraints.check_options_of_some(self, (self.strategy,))
        constraints.check_dataset(self)
        if list(self.num_devices) != sorted(self.num_devices):
            shown = ",".join(map(str, self.num_devices))
            raise ConfigError(f"--num_devices must rise, got {shown}; for example 2,3,4")
        if self.all_reduce == "hierarchical":
            raise ConfigError(
                "--all_reduce=hierarchical cannot be explained: its cost is not known; use"
                " --all_reduce=auto"
            )
        for num_devices in self.num_devices:
            split_constraints.check_split(self.strategy, self, num_devices)
            training = self.for_training(num_devices=num_devices, last_batch="drop")
            training.check_shards(num_devices, self.num_train_examples or NUM_TRAIN_EXAMPLES)
