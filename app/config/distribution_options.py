"""Options of devices, strategies, workers and the all-reduce."""

import dataclasses

from app.config.framework_options import without_frameworks
from app.config.names import (
    ALL_REDUCE_NAMES,
    CLUSTER,
    COMPARED_BY_DEFAULT,
    DEFAULT_LOGICAL_CPUS,
    DISTRIBUTION,
    MAX_LOCAL_WORKERS,
    MAX_LOGICAL_DEVICES,
    MULTI_WORKER,
    SINGLE,
    STRATEGY_NAMES,
)
from app.config.option import option
from strategies import ALL_REDUCE_ALGORITHMS, STRATEGIES


@dataclasses.dataclass(frozen=True, kw_only=True)
class DeviceOptions:
    """Selects the type and number of devices."""

    num_gpus: int | None = option(
        None,
        "Number of GPUs. On a machine without GPUs: N logical CPU devices.",
        DISTRIBUTION,
        metavar="N",
        low=1,
        high=MAX_LOGICAL_DEVICES,
    )
    device: str = option(
        "auto",
        "Device type: gpu fails without a GPU, cpu uses logical CPU devices.",
        DISTRIBUTION,
        choices=("auto", "gpu", "cpu"),
    )
    num_devices: int | None = option(
        None,
        "Number of devices (multi_worker: of each worker). Default: all GPUs, or 2 "
        "logical CPU devices.",
        DISTRIBUTION,
        metavar="N",
        low=1,
        high=MAX_LOGICAL_DEVICES,
    )

    @property
    def default_num_devices(self) -> int | None:
        """The number of devices without a flag; None if it depends on the machine."""
        return DEFAULT_LOGICAL_CPUS if self.device == "cpu" else None

    @property
    def num_devices_asked(self) -> int | None:
        """The number of devices of each worker; None if it depends on the machine."""
        return self.num_devices or self.num_gpus or self.default_num_devices

    @property
    def num_devices_of_all_workers(self) -> int | None:
        """The total number of devices; None if it depends on the machine or the cluster."""
        return self.num_devices_asked


@dataclasses.dataclass(frozen=True, kw_only=True)
class StrategyOptions(DeviceOptions):
    """Selects one strategy and its devices."""

    strategy: str = option(
        "manual",
        "Distribution strategy. manual and mirrored split the batch, sharded the batch and the"
        " weights, pipeline the layers, tensor each layer; multi_worker has several"
        " processes, on one or more machines.",
        DISTRIBUTION,
        choices=STRATEGY_NAMES,
        affects_result=True,
    )

    @property
    def has_workers(self) -> bool:
        """Whether the strategy uses several processes."""
        return self.strategy == MULTI_WORKER

    @property
    def default_num_devices(self) -> int | None:
        """1 for `single`, and for a worker on CPUs."""
        if self.strategy == SINGLE:
            return 1
        if self.has_workers:
            return 1 if self.device == "cpu" else None
        return super().default_num_devices

    @property
    def num_devices_of_all_workers(self) -> int | None:
        """The total number of devices; None if it depends on the machine or the cluster."""
        return None if self.has_workers else self.num_devices_asked


@dataclasses.dataclass(frozen=True, kw_only=True)
class StrategiesOptions:
    """Selects the strategies to compare."""

    strategies: tuple[str, ...] = option(
        COMPARED_BY_DEFAULT,
        "The strategies, separated by commas.",
        DISTRIBUTION,
        metavar="A,B,…",
        choices=STRATEGY_NAMES,
    )

    @property
    def has_workers(self) -> bool:
        """Whether one of the strategies uses several processes."""
        return MULTI_WORKER in self.strategies


@dataclasses.dataclass(frozen=True, kw_only=True)
class AllReduceOptions:
    """Selects the all-reduce of the gradients."""

    all_reduce: str = option(
        "auto",
        "All-reduce algorithm. "
        + "; ".join(
            f"{name}: {', '.join(ALL_REDUCE_ALGORITHMS[name])}"
            for name in STRATEGIES
            if ALL_REDUCE_ALGORITHMS.get(name)
        )
        + ". mirrored and multi_worker have nccl on GPUs only, mirrored has ring on CPUs only.",
        DISTRIBUTION,
        choices=("auto", *ALL_REDUCE_NAMES),
        affects_result=True,
    )
    bucket_mib: float | None = option(
        None,
        "Size of the gradient buckets in MiB; 0 all-reduces each gradient on its own. Default:"
        " multi_worker has one bucket for all gradients, other strategies none.",
        DISTRIBUTION,
        metavar="X",
        low=0,
        high=4096,
        affects_result=True,
    )
    communication_dtype: str = option(
        "float32",
        "Dtype of the gradient all-reduce.",
        DISTRIBUTION,
        choices=("float32", "bfloat16"),
        affects_result=True,
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class BatchOptions:
    """Controls how a batch is split and used."""

    last_batch: str = option(
        "keep",
        "Keep or drop the smaller batch at the end of an epoch.",
        DISTRIBUTION,
        choices=("keep", "drop"),
        affects_result=True,
    )
    batch_norm: str = option(
        "average",
        "average: each shard of the batch is normalised by its own statistics, and the "
        "moving statistics are averaged over the shards. sync: all replicas use the "
        "statistics of the whole batch.",
        DISTRIBUTION,
        choices=("average", "sync"),
        affects_result=True,
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class WorkerOptions:
    """Selects the number of worker processes."""

    num_workers: int = option(
        2,
        "Number of worker processes on this machine.",
        CLUSTER,
        metavar="N",
        low=1,
        high=MAX_LOCAL_WORKERS,
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class ComparedStrategiesOptions(StrategiesOptions, DeviceOptions, WorkerOptions):
    """Selects several strategies on equally many devices.

    If `multi_worker` is one of them, the other strategies have as many devices on one machine as
    its workers have in total.
    """

    @property
    def own_strategies(self) -> tuple[str, ...]:
        """The strategies of this project, without frameworks."""
        return without_frameworks(self.strategies)

    @property
    def default_num_devices(self) -> int | None:
        """1 per worker if a strategy has workers."""
        return 1 if self.has_workers else super().default_num_devices

    @property
    def num_devices_of_all_workers(self) -> int | None:
        """The number of devices of each strategy; None if it depends on the machine."""
        if not self.has_workers:
            return self.num_devices_asked
        return self.num_devices_asked and self.num_devices_asked * self.num_workers
