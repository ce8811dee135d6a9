"""Defines the options of the commands `demo` and `doctor`."""

import dataclasses
from typing import Any, ClassVar

from app.config import constraints
from app.config.base_config import Config
from app.config.distribution_options import (
    AllReduceOptions,
    DeviceOptions,
    StrategiesOptions,
)
from app.config.model_options import (
    DatasetOptions,
    Hyperparameters,
    SubsetOptions,
)
from app.config.names import (
    ONE_MACHINE_STRATEGIES,
    WORDS,
)
from app.config.option import option, same_option
from app.config.run_options import OutputOptions, VerbosityOptions
from app.config.split_numbers import has_option
from app.config.training_configs import TrainConfig, training_config
from app.runtime.errors import ConfigError
from strategies import ALL_REDUCE_ALGORITHMS


@dataclasses.dataclass(frozen=True, kw_only=True)
class DemoConfig(DeviceOptions, DatasetOptions, VerbosityOptions, Config):
    """The options of `demo`."""

    command: ClassVar[str] = "demo"
    summary: ClassVar[str] = "the experiments of d2l; without a name, lists them"
    examples: ClassVar[tuple[str, ...]] = ("", "allreduce --num_devices=3")

    experiment: str | None = option(
        None,
        "The experiment.",
        WORDS,
        metavar="EXPERIMENT",
        positional=True,
        choices=("allreduce", "split_batch", "replicate"),
    )
    all_reduce: str = same_option(
        AllReduceOptions,
        "all_reduce",
        help="All-reduce algorithm.",
        choices=("auto", *ALL_REDUCE_ALGORITHMS["manual"]),
    )
    seed: int = same_option(Hyperparameters, "seed")

    def check(self) -> None:
        """Checks combinations of options."""
        constraints.check_devices(self)
        constraints.check_dataset(self)
        asked = self.num_devices or self.num_gpus
        if self.experiment and asked == 1:
            raise ConfigError(f"demo {self.experiment} needs at least 2 devices, got {asked}")
        if self.experiment == "split_batch" and self.all_reduce != "auto":
            raise ConfigError("--all_reduce is not an option of demo split_batch; leave it out")

    def for_training(self, **options: Any) -> TrainConfig:
        """Returns the configuration of a training with `manual`."""
        return training_config(self, "manual", **options)


@dataclasses.dataclass(frozen=True, kw_only=True)
class DoctorConfig(StrategiesOptions, DeviceOptions, DatasetOptions, VerbosityOptions, Config):
    """The options of `doctor`."""

    command: ClassVar[str] = "doctor"
    summary: ClassVar[str] = "checks this machine: what it has, what is missing, what to run"
    examples: ClassVar[tuple[str, ...]] = ("", "--data_dir=DIR --num_gpus=2")

    strategies: tuple[str, ...] = same_option(
        StrategiesOptions,
        "strategies",
        default=("manual", "mirrored"),
        help="Strategies whose all-reduce is tested.",
        choices=ONE_MACHINE_STRATEGIES,
    )
    dataset: str = same_option(SubsetOptions, "dataset")
    all_reduce: str = same_option(AllReduceOptions, "all_reduce")
    out: str | None = same_option(OutputOptions, "out", help="Output directory to examine.")

    def check(self) -> None:
        """Checks combinations of options."""
        constraints.check_devices(self)
        constraints.check_single("--strategies", self.strategies, self.num_devices or self.num_gpus)
        names = [name for name in self.strategies if has_option(name, "all_reduce")]
        constraints.check_algorithm(self.all_reduce, names or self.strategies[:1], self.device)
        constraints.check_dataset(self)
