"""Defines the cases to measure, the facts that their processes report, and the samples."""

import dataclasses
from collections.abc import Sequence

from app.options import Config
from app.performance.traffic import Traffic

_BETWEEN = ", "


@dataclasses.dataclass(frozen=True)
class Case:
    """A training whose speed is measured in a separate process.

    Attributes:
        config: options of a `train`, which include all differences between two cases.
        num_workers: number of worker processes, for multi_worker.
        no_sync: skip the all-reduce; each replica continues with its own gradient.
        reads_input: False to train on the first batch repeatedly, without an input pipeline.
        cores: use at most this many cores; None for all. Not for workers, which have their own.
        counts_traffic: count the bytes that a step sends, after the last round.
    """

    config: Config
    num_workers: int = 1
    no_sync: bool = False
    reads_input: bool = True
    cores: int | None = None
    counts_traffic: bool = False

    @property
    def is_whole(self) -> bool:
        """Whether nothing is left out of the steps."""
        return self.reads_input and not self.no_sync and self.cores is None

    @property
    def name(self) -> str:
        """The name of the case in tables and progress lines."""
        config = self.config
        number = config.num_devices_asked
        if config.has_workers:
            number = self.num_workers * (number or 1)
        parts = [
            f"{config.distribution.strategy} × {number or 'all'}",
            config.training.model,
            f"batch {config.training.global_batch_size}",
            config.training.precision,
        ]
        parts += ["without all-reduce"] if self.no_sync else []
        parts += [] if self.reads_input else ["without input"]
        parts += [f"{self.cores} core{'s' if self.cores > 1 else ''}"] if self.cores else []
        return _BETWEEN.join(parts)


def split_names(names: Sequence[str]) -> tuple[str, dict[str, str]]:
    """Splits names of cases into their common part and their distinguishing parts.

    Returns:
        The common part; and name → the rest of the name, which includes its strategy.
    """
    per_name = {name: name.split(_BETWEEN) for name in names}
    common = [p for p in per_name[names[0]][1:] if all(p in parts for parts in per_name.values())]
    short = {
        name: _BETWEEN.join(p for p in parts if p not in common) for name, parts in per_name.items()
    }
    return _BETWEEN.join(common), short


@dataclasses.dataclass(frozen=True)
class Facts:
    """The actual properties of a training, as its process reports them.

    Attributes:
        devices: devices of all workers.
        simulated_devices: whether logical devices share one processor.
        cores: processor cores that the process may use.
        intra_op_threads: threads of one operation on a CPU; 0 for TensorFlow's default.
        dataset: name of the dataset.
        global_batch_size: examples per step over all replicas; no step has fewer.
        jit_compile: whether XLA compiles the computation of a replica.
        all_reduce: name of the algorithm.
        tensor_float_32: whether GPUs may round the inputs of float32 products to 10 bits.
        compile_sec: seconds from the import of TensorFlow until the end of the first step.
        versions: versions of the software that affects the results.
    """

    devices: list[str]
    simulated_devices: bool
    cores: int
    intra_op_threads: int
    dataset: str
    global_batch_size: int
    jit_compile: bool
    all_reduce: str
    tensor_float_32: bool
    compile_sec: float
    versions: dict[str, str]

    @property
    def num_devices(self) -> int:
        """The number of devices."""
        return len(self.devices)


@dataclasses.dataclass(frozen=True)
class Block:
    """Some steps that were timed together.

    Attributes:
        num_steps: number of steps.
        num_examples: number of examples trained on.
        sec: seconds from the call until the last result.
        tracings: number of retracings during the block; 0 in a valid measurement.
    """

    num_steps: int
    num_examples: int
    sec: float
    tracings: int

    @property
    def step_sec(self) -> float:
        """Seconds per step."""
        return self.sec / self.num_steps


@dataclasses.dataclass(frozen=True)
class Sample:
    """A case with its measurements.

    Attributes:
        case: the case.
        facts: the actual properties of its training.
        blocks: one block per round; block i of all cases was measured in round i.
        peak_memory_bytes: peak memory of its processes, or of its GPUs.
        traffic: bytes between devices; None if they were not counted.
    """

    case: Case
    facts: Facts
    blocks: list[Block]
    peak_memory_bytes: int
    traffic: Traffic | None = None

    @property
    def step_secs(self) -> list[float]:
        """Seconds per step, in each round."""
        return [block.step_sec for block in self.blocks]

    @property
    def rates(self) -> list[float]:
        """Images per second, in each round."""
        return [block.num_examples / block.sec for block in self.blocks]
