"""The commands that train with several strategies: `compare` and `verify`."""

import dataclasses
from typing import Any, ClassVar

from app.config import constraints, split_constraints
from app.config.base_config import Config
from app.config.case_options import (
    CaseOptions,
    check_no_case,
    check_verified_case,
)
from app.config.distribution_options import ComparedStrategiesOptions, WorkerOptions
from app.config.fault import Fault
from app.config.framework_options import (
    FRAMEWORK_NAMES,
    FRAMEWORKS,
    check_frameworks,
)
from app.config.names import (
    CASE_STRATEGIES,
    COMPARED_BY_DEFAULT,
    KERAS_FIT,
    MULTI_WORKER,
    SINGLE,
    STRATEGY_NAMES,
    VERIFICATION,
)
from app.config.option import option, same_option
from app.config.run_options import InjectOptions, SavingOptions
from app.config.split_numbers import has_option
from app.config.trace_options import TraceOptions, check_no_traces, check_traces
from app.config.training_configs import (
    TrainConfig,
    TrainingOptions,
    num_faulty,
    training_config,
)
from app.runtime.errors import ConfigError


@dataclasses.dataclass(frozen=True, kw_only=True)
class CompareConfig(ComparedStrategiesOptions, TrainingOptions, SavingOptions, Config):
    """The options of `compare`."""

    command: ClassVar[str] = "compare"
    summary: ClassVar[str] = "trains several strategies from the same weights and data"
    examples: ClassVar[tuple[str, ...]] = (
        "--recipe=fast --epochs=1",
        "--strategies=single,manual --num_gpus=2",
        "--strategies=single,torch_ddp,jax_pmap --epochs=1",
    )

    strategies: tuple[str, ...] = same_option(
        ComparedStrategiesOptions,
        "strategies",
        help="Strategies, separated by commas. torch_ddp, jax_jit and jax_pmap train in PyTorch"
        " and JAX: see make frameworks.",
        choices=(*STRATEGY_NAMES, *FRAMEWORK_NAMES),
    )

    def check(self) -> None:
        """Checks combinations of options."""
        _check_compared(self)
        if len(self.strategies) < 2:
            raise ConfigError(
                f"--strategies must name at least two, got {','.join(self.strategies)}"
            )

    def for_training(self, strategy: str, **options: Any) -> TrainConfig:
        """Returns the configuration of the training with one of the strategies.

        A framework gets the configuration of `single`.
        """
        strategy = SINGLE if strategy in FRAMEWORKS else strategy
        return training_config(self, strategy, **{**_devices_of(self, strategy), **options})


@dataclasses.dataclass(frozen=True, kw_only=True)
class VerifyConfig(
    ComparedStrategiesOptions, TrainingOptions, InjectOptions, CaseOptions, TraceOptions, Config
):
    """The options of `verify`."""

    command: ClassVar[str] = "verify"
    summary: ClassVar[str] = "compares strategies step by step and names the first mismatch"
    first_group: ClassVar[str] = VERIFICATION
    examples: ClassVar[tuple[str, ...]] = (
        "--strategies=manual,mirrored --steps=20",
        "--strategies=manual --inject=drop_gradient:replica=1",
        "--case=examples/case_fit.py --num_devices=2",
        "--strategies=single,manual,mirrored,torch_ddp,jax_pmap",
        "--traces=one.npz,two.npz,permuted.npz",
    )

    strategies: tuple[str, ...] = same_option(
        ComparedStrategiesOptions,
        "strategies",
        default=(),
        help="Strategies to verify; default single,manual,mirrored, and with --case"
        " single,keras_fit, Keras' own fit under MirroredStrategy. torch_ddp, jax_jit and jax_pmap"
        " train in PyTorch and JAX: see make frameworks.",
        choices=(*STRATEGY_NAMES, KERAS_FIT, *FRAMEWORK_NAMES),
    )
    steps: int = option(
        20, "Number of steps to verify.", VERIFICATION, metavar="N", low=1, high=100_000
    )
    keep_traces: bool = option(
        False, "Keep the recorded traces in a directory for each strategy.", VERIFICATION
    )

    def __post_init__(self) -> None:
        if self.strategies == ():
            default = CASE_STRATEGIES if self.case else COMPARED_BY_DEFAULT
            object.__setattr__(self, "strategies", default)
        super().__post_init__()

    def check(self) -> None:
        """Checks combinations of options."""
        if self.traces:
            check_traces(self)
            return
        check_no_traces(self)
        if self.case is not None:
            check_verified_case(self)
            return
        check_no_case(self)
        _check_compared(self)
        flag = f"--inject={self.inject}"
        constraints.check_fault(self.fault, flag, self.own_strategies, self._num_faulty)
        constraints.check_fault_steps(self.fault, flag, self.steps)

    @property
    def faulty_strategy(self) -> str | None:
        """The strategy that gets the fault; None without a fault."""
        if self.fault is None:
            return None
        return constraints.faulty_strategy(self.fault, self.own_strategies, self._num_faulty)

    def _num_faulty(self, strategy: str, fault: Fault) -> int | None:
        """Returns the number of the units that a fault needs several of."""
        training = self.for_training(strategy, inject=None)
        number = 1 if strategy == SINGLE else self.num_devices_of_all_workers
        return number and num_faulty(strategy, training, number, fault)

    def result_fields(self) -> dict[str, Any]:
        """Returns the fields that affect the results, without paths and display."""
        return super().result_fields() | self.inject_field()

    def for_training(self, strategy: str, **options: Any) -> TrainConfig:
        """Returns the configuration of the training with one of the strategies.

        A framework gets the configuration of `single`.
        """
        strategy = SINGLE if strategy in FRAMEWORKS else strategy
        return training_config(self, strategy, **{**_devices_of(self, strategy), **options})

    def on_one_machine(self) -> TrainConfig:
        """Returns a single-process training on as many devices as the strategies use.

        Prefers a strategy with an all-reduce, whose dtype determines the tolerance.
        """
        parallel = [name for name in self.own_strategies if name not in (SINGLE, MULTI_WORKER)]
        parallel.sort(key=lambda name: not has_option(name, "all_reduce"))
        if self.has_workers and not (parallel and has_option(parallel[0], "all_reduce")):
            return self.for_training("manual", inject=None, all_reduce="auto", bucket_mib=None)
        return self.for_training((*parallel, SINGLE)[0], inject=None)


def _check_compared(compared: CompareConfig | VerifyConfig) -> None:
    """Checks combinations of options of a command that compares strategies."""
    check_frameworks(compared)
    names = compared.own_strategies
    constraints.check_devices(compared)
    number = compared.num_devices or compared.num_gpus
    constraints.check_single("--strategies", compared.strategies, number)
    constraints.check_workers(
        compared.has_workers,
        names,
        num_workers=(compared.num_workers, WorkerOptions.num_workers),
    )
    constraints.check_all_reduce(compared, names, compared.device)
    split_constraints.check_options_of_some(compared, names)
    compared.check_training()
    for name in names:
        training = compared.for_training(name, inject=None)
        training.check_shards(1 if name == SINGLE else compared.num_devices_of_all_workers)


def _devices_of(compared: ComparedStrategiesOptions, strategy: str) -> dict[str, Any]:
    """Returns the device options of a compared strategy that differ from the flags."""
    if not compared.has_workers or strategy == SINGLE:
        return {}
    own = strategy == MULTI_WORKER
    number = compared.num_devices_asked if own else compared.num_devices_of_all_workers
    name = "num_gpus" if compared.num_gpus else "num_devices"
    return {name: number, "num_devices": number}
