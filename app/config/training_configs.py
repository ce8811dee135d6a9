"""The commands that train: `train`, `launch`, `compare` and `verify`."""

import dataclasses
from typing import Any, ClassVar

from app.config import constraints
from app.config.base_config import Config
from app.config.distribution_options import (
    AllReduceOptions,
    BatchOptions,
    ComparedStrategiesOptions,
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
    CLUSTER,
    MULTI_WORKER,
    NUM_TRAIN_EXAMPLES,
    ONE_MACHINE_STRATEGIES,
    SINGLE,
    VERIFICATION,
)
from app.config.option import option, options_of, same_option
from app.config.run_options import (
    InjectOptions,
    OutputOptions,
    ResumeOptions,
    SavingOptions,
    VerbosityOptions,
)
from app.runtime.errors import ConfigError

# What a training on one device does not have: it is set back to its default.
_OF_SEVERAL_DEVICES = ("num_devices", "num_gpus", *constraints.ALL_REDUCE_OPTIONS)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainingOptions(
    ModelOptions,
    SubsetOptions,
    AllReduceOptions,
    BatchOptions,
    Hyperparameters,
    ComputationOptions,
    OutputOptions,
    VerbosityOptions,
):
    """What every command takes that trains one model."""

    def check_training(self) -> None:
        """Checks what options of a training must be together.

        Raises:
            ConfigError: two contradict each other.
        """
        constraints.check_dataset(self)

    def check_shards(self, num_replicas: int, num_train_examples: int | None = None) -> None:
        """Checks that every replica gets an example of every batch.

        Args:
            num_replicas: R.
            num_train_examples: of the data set; None for what the options say.

        Raises:
            ConfigError: some replica would get nothing, or an epoch would have no step.
        """
        constraints.check_shards(
            global_batch_size=self.global_batch_size,
            last_batch=self.last_batch,
            num_replicas=num_replicas,
            num_train_examples=num_train_examples or self.num_train_examples or NUM_TRAIN_EXAMPLES,
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainConfig(
    StrategyOptions, TrainingOptions, SavingOptions, ResumeOptions, InjectOptions, Config
):
    """The options of `train`: one training."""

    command: ClassVar[str] = "train"
    summary: ClassVar[str] = "one training, with history, plots and checkpoint in one directory"
    examples: ClassVar[tuple[str, ...]] = (
        "--strategy=manual --device=cpu --num_devices=2 --epochs=3",
        "--recipe=fast --epochs=1 --out=runs/first",
        "--strategy=mirrored --num_gpus=2 --model=resnet18",
    )

    def check(self) -> None:
        """Checks what options must be together."""
        names = (self.strategy,)
        constraints.check_devices(self)
        constraints.check_single("--strategy", names, self.num_devices or self.num_gpus)
        constraints.check_workers(
            self.has_workers,
            names,
            start_timeout_sec=(self.start_timeout_sec, TrainConfig.start_timeout_sec),
        )
        constraints.check_all_reduce(self, names, self.device)
        self.check_training()
        if self.overwrite and self.force_resume:
            raise ConfigError(
                "--overwrite starts from scratch and --force_resume resumes; leave one of them out"
            )
        constraints.check_fault(
            self.fault, f"--inject={self.inject}", names, self.num_replicas_asked
        )
        self.check_shards(self.num_replicas_asked or 1)

    def train_flags(self) -> list[str]:
        """Returns the flags of a `train` that does this, without `--out`."""
        return [
            f"--{each.name}={getattr(self, each.name)}"
            for each in options_of(self)
            if each.name != "out" and getattr(self, each.name) != each.default
        ]

    def result_fields(self) -> dict[str, Any]:
        """Returns what the result of the training depends on, without paths and display."""
        return super().result_fields() | self.inject_field()


def training_config(config: Config, strategy: str, **options: Any) -> TrainConfig:
    """Returns the configuration of a training with one strategy, else with a command's options.

    `single` has one device, with all cores, and no all-reduce.

    Args:
        config: of the command; options that `train` does not have are left out, as are lists.
        strategy: of the training.
        **options: what differs from the command's options.
    """
    given = {
        each.name: getattr(config, each.name)
        for each in options_of(TrainConfig)
        if hasattr(config, each.name)
    }
    given = {n: v for n, v in given.items() if v is not None and not isinstance(v, tuple)} | options
    if strategy == SINGLE:
        given = {n: v for n, v in given.items() if n not in _OF_SEVERAL_DEVICES}
    return TrainConfig(**{**given, "strategy": strategy})


@dataclasses.dataclass(frozen=True, kw_only=True)
class LaunchConfig(
    StrategyOptions,
    TrainingOptions,
    SavingOptions,
    ResumeOptions,
    InjectOptions,
    WorkerOptions,
    Config,
):
    """The options of `launch`: a training with several processes of this machine."""

    command: ClassVar[str] = "launch"
    summary: ClassVar[str] = "the same with several local processes, restarted after a failure"
    examples: ClassVar[tuple[str, ...]] = ("--num_workers=2 --device=cpu --epochs=1",)

    strategy: str = same_option(
        StrategyOptions, "strategy", default=MULTI_WORKER, choices=(MULTI_WORKER,)
    )
    max_restarts: int = option(
        3,
        "How often all workers are restarted after a failure.",
        CLUSTER,
        metavar="N",
        low=0,
        high=1000,
    )

    @property
    def num_replicas_asked(self) -> int | None:
        """The number of replicas of all workers; None where the machine decides."""
        return self.num_devices_asked and self.num_devices_asked * self.num_workers

    def check(self) -> None:
        """Checks what options must be together."""
        training = self.train_config()  # It checks all but the number of replicas.
        flag = f"--inject={self.inject}"
        constraints.check_fault(self.fault, flag, (self.strategy,), self.num_replicas_asked)
        training.check_shards(self.num_replicas_asked or 1)

    def train_config(self) -> TrainConfig:
        """Returns the configuration of each worker."""
        return training_config(self, self.strategy)


@dataclasses.dataclass(frozen=True, kw_only=True)
class CompareConfig(ComparedStrategiesOptions, TrainingOptions, SavingOptions, Config):
    """The options of `compare`: several strategies, side by side."""

    command: ClassVar[str] = "compare"
    summary: ClassVar[str] = "several strategies from the same weights and data, side by side"
    examples: ClassVar[tuple[str, ...]] = (
        "--recipe=fast --epochs=1",
        "--strategies=single,manual --num_gpus=2",
    )

    def check(self) -> None:
        """Checks what options must be together."""
        _check_compared(self, self)
        if len(self.strategies) < 2:
            raise ConfigError(
                f"--strategies must name at least two, got {','.join(self.strategies)}"
            )
        for name in self.strategies:
            self.for_training(name)

    def for_training(self, strategy: str, **options: Any) -> TrainConfig:
        """Returns the configuration of the training with one of the strategies."""
        return training_config(self, strategy, **{**_devices_of(self, strategy), **options})


@dataclasses.dataclass(frozen=True, kw_only=True)
class VerifyConfig(ComparedStrategiesOptions, TrainingOptions, InjectOptions, Config):
    """The options of `verify`: are these strategies the same training?"""

    command: ClassVar[str] = "verify"
    summary: ClassVar[str] = "are strategies the same training? names the first mismatch if not"
    examples: ClassVar[tuple[str, ...]] = (
        "--strategies=manual,mirrored --steps=20",
        "--strategies=manual --inject=drop_gradient:replica=1",
    )

    steps: int = option(20, "Steps to verify.", VERIFICATION, metavar="N", low=1, high=100_000)
    keep_traces: bool = option(
        False, "Keep the recorded traces, a directory for each strategy.", VERIFICATION
    )

    def check(self) -> None:
        """Checks what options must be together."""
        _check_compared(self, self)
        if self.precision == "mixed_float16":
            raise ConfigError(
                "--precision=mixed_float16 cannot be verified, as it needs a loss scale; use"
                " --precision=mixed_bfloat16 or float32"
            )
        flag = f"--inject={self.inject}"
        constraints.check_fault(self.fault, flag, self.strategies, self.num_replicas_asked)
        constraints.check_fault_steps(self.fault, flag, self.steps)
        for name in self.strategies:
            self.for_training(name, inject=None)

    def result_fields(self) -> dict[str, Any]:
        """Returns what the result of the trainings depends on, without paths and display."""
        return super().result_fields() | self.inject_field()

    def for_training(self, strategy: str, **options: Any) -> TrainConfig:
        """Returns the configuration of the training with one of the strategies."""
        return training_config(self, strategy, **{**_devices_of(self, strategy), **options})

    def on_one_machine(self) -> TrainConfig:
        """Returns a training of one process, with as many replicas as the strategies have."""
        parallel = [n for n in self.strategies if n in ONE_MACHINE_STRATEGIES and n != SINGLE]
        if parallel:
            return self.for_training(parallel[0], inject=None)
        if self.has_workers:
            return self.for_training("manual", inject=None, all_reduce="auto", bucket_mib=None)
        return self.for_training(SINGLE, inject=None)


def _check_compared(compared: ComparedStrategiesOptions, training: TrainingOptions) -> None:
    """Checks what options of a command that compares strategies must be together."""
    names = compared.strategies
    constraints.check_devices(compared)
    constraints.check_single("--strategies", names, compared.num_devices or compared.num_gpus)
    constraints.check_workers(
        compared.has_workers,
        names,
        num_workers=(compared.num_workers, WorkerOptions.num_workers),
    )
    constraints.check_all_reduce(training, names, compared.device)
    training.check_training()
    training.check_shards(compared.num_replicas_asked or 1)


def _devices_of(compared: ComparedStrategiesOptions, strategy: str) -> dict[str, Any]:
    """Returns how many devices one of the compared strategies has, where that is not as asked."""
    if not compared.has_workers or strategy == SINGLE:
        return {}
    own = strategy == MULTI_WORKER
    number = compared.num_devices_asked if own else compared.num_replicas_asked
    name = "num_gpus" if compared.num_gpus else "num_devices"
    return {name: number, "num_devices": number}
