"""Defines the options of the command `benchmark`."""

import dataclasses
from typing import Any, ClassVar

from app.config import constraints, split_constraints
from app.config.base_config import Config
from app.config.distribution_options import (
    AllReduceOptions,
    BatchOptions,
    DeviceOptions,
    StrategiesOptions,
)
from app.config.model_options import (
    ComputationOptions,
    Hyperparameters,
    ModelOptions,
    SubsetOptions,
)
from app.config.names import (
    MEASUREMENT,
    MULTI_WORKER,
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
    examples: ClassVar[tuple[str, ...]] = (
        "--num_devices=1,2,4 --repeats=20",
        "--breakdown --strategies=manual,pipeline --num_devices=4",
    )

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
    breakdown: bool = option(
        False,
        "Show where the time of a step goes, by leaving one part out at a time, and count the bytes"
        " between devices.",
        MEASUREMENT,
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
        if self.breakdown:
            if MULTI_WORKER in self.strategies:
                raise ConfigError(
                    "--breakdown measures one machine, got --strategies with multi_worker; leave"
                    " multi_worker out"
                )
            if max(self.num_devices) == 1 or set(self.strategies) == {SINGLE}:
                raise ConfigError(
                    "--breakdown needs a strategy on several devices; use --strategies=manual"
                    " --num_devices=2"
                )
