"""What is measured, what the process that measures it found, and what it took."""

import dataclasses
from collections.abc import Sequence

from app.config import TrainConfig
from app.performance.peak_memory import PeakMemory


@dataclasses.dataclass(frozen=True)
class Case:
    """One training whose speed is measured in a process of its own.

    Attributes:
        config: of a `train`, with everything that may differ between two cases.
        num_workers: how many processes train together, with the strategy multi_worker.
        no_sync: True leaves the all-reduce out: each replica continues with its own gradient.
        reads_input: False trains on the first batch again and again, with no input pipeline.
        cores: use no more than these, None for all.
    """

    config: TrainConfig
    num_workers: int = 1
    no_sync: bool = False
    reads_input: bool = True
    cores: int | None = None

    @property
    def num_devices(self) -> int | None:
        """How many devices are asked for, over all workers; None for all that there are."""
        config = self.config
        if config.has_workers:
            return self.num_workers * (config.num_devices_asked or 1)
        return config.num_devices_asked

    @property
    def name(self) -> str:
        """What the case is called in tables and progress lines."""
        config = self.config
        parts = [
            f"{config.strategy} × {self.num_devices or 'all'}",
            config.model,
            f"batch {config.global_batch_size}",
            config.precision,
        ]
        parts += ["without all-reduce"] if self.no_sync else []
        parts += [] if self.reads_input else ["without input"]
        parts += [f"{self.cores} core{'s' * (self.cores > 1)}"] if self.cores else []
        return _BETWEEN.join(parts)


_BETWEEN = ", "


def split_names(names: Sequence[str]) -> tuple[str, dict[str, str]]:
    """Splits names of cases into what all have in common and what tells them apart.

    Returns:
        The common part; and name → the rest of it, its strategy in any case.
    """
    per_name_parts = {name: name.split(_BETWEEN) for name in names}
    common = [
        part
        for part in next(iter(per_name_parts.values()))[1:]
        if all(part in parts for parts in per_name_parts.values())
    ]
    short = {
        name: _BETWEEN.join(part for part in parts if part not in common)
        for name, parts in per_name_parts.items()
    }
    return _BETWEEN.join(common), short


@dataclasses.dataclass(frozen=True)
class Facts:
    """What a process found when it had built its training: that, and not what was asked for.

    Attributes:
        devices: of all workers.
        num_replicas: parts of a batch that are trained on at the same time.
        simulated_devices: logical devices that share one processor.
        cores: processor cores that the process may use.
        intra_op_threads: of one operation on a CPU, 0 for TensorFlow's own choice.
        dataset: which images.
        global_batch_size: examples of a step over all replicas; no step has fewer.
        compute_dtype: what the layers compute in.
        jit_compile: whether XLA compiles what a replica computes.
        all_reduce: the algorithm.
        tensor_float_32: whether GPUs may round the inputs of float32 products to 10 bits; False
            without GPUs.
        gradient_bytes: what each replica sends in a step, in the dtype of the exchange.
        flops_per_example: multiplications and additions of convolutions and matrix products in
            training on one example.
        compile_sec: until the first step was done, from importing TensorFlow on.
        versions: of what numbers depend on.
    """

    devices: list[str]
    num_replicas: int
    simulated_devices: bool
    cores: int
    intra_op_threads: int
    dataset: str
    global_batch_size: int
    compute_dtype: str
    jit_compile: bool
    all_reduce: str
    tensor_float_32: bool
    gradient_bytes: int
    flops_per_example: float
    compile_sec: float
    versions: dict[str, str]

    @property
    def num_devices(self) -> int:
        """How many devices there are."""
        return len(self.devices)


@dataclasses.dataclass(frozen=True)
class Block:
    """Some steps that were timed together.

    Attributes:
        num_steps: how many.
        num_examples: trained on in them.
        sec: what they took, from the call until the last result was there.
        tracings: how often a compiled call was traced anew meanwhile: 0 in a valid measurement.
    """

    num_steps: int
    num_examples: int
    sec: float
    tracings: int

    @property
    def step_sec(self) -> float:
        """Seconds of a step."""
        return self.sec / self.num_steps


@dataclasses.dataclass(frozen=True)
class Sample:
    """A case with its measurements.

    Attributes:
        case: what was asked for.
        facts: what was found.
        blocks: one for each round, in order: block i of all cases was measured in round i.
        memory: the most that the process, or its GPUs, held.
    """

    case: Case
    facts: Facts
    blocks: list[Block]
    memory: PeakMemory

    @property
    def step_secs(self) -> list[float]:
        """Seconds of a step, in each round."""
        return [block.step_sec for block in self.blocks]

    @property
    def rates(self) -> list[float]:
        """Images a second, in each round."""
        return [block.num_examples / block.sec for block in self.blocks]
