"""Defines the records of a split training's profile."""

import dataclasses
from collections.abc import Sequence

import numpy as np

from app.performance.pipeline_timeline import TimedTask, idle_share, most_in_flight


@dataclasses.dataclass(frozen=True)
class Traffic:
    """Bytes sent between devices in a step.

    Attributes:
        terms: name, formula and bytes of each kind of traffic, by formula.
        formula_bytes: total by formula; None without a formula.
        counted_bytes: total of the tensors that cross devices in the graph; None if not countable.
        input_bytes: counted bytes of images, labels and numbers.
        links: sender, receiver, bytes by formula and counted bytes, for each pair that
            communicates.
        note: why there is no formula, or no count.
    """

    terms: list[tuple[str, str, int]]
    formula_bytes: int | None
    counted_bytes: int | None
    input_bytes: int | None
    links: list[tuple[int, int, int, int]]
    note: str


@dataclasses.dataclass(frozen=True)
class HeldState:
    """Bytes that a device holds between steps."""

    device: str
    weights_bytes: int
    optimizer_bytes: int
    statistics_bytes: int


@dataclasses.dataclass(frozen=True)
class TimedSteps:
    """Timed tasks of a pipeline.

    Attributes:
        idle_shares: idle fraction of each timed step.
        tasks: tasks of the step with the median idle fraction.
        in_flight: for each stage, the most micro-batches stored at the same time.
    """

    idle_shares: list[float]
    tasks: list[TimedTask]
    in_flight: list[int]

    @classmethod
    def of(cls, steps: Sequence[list[TimedTask]]) -> "TimedSteps":
        """Summarises timed steps."""
        shares = [idle_share(tasks) for tasks in steps]
        middle = int(np.argsort(shares)[len(shares) // 2])
        most = np.max([most_in_flight(tasks) for tasks in steps], axis=0)
        return cls(shares, steps[middle], [int(number) for number in most])

    @property
    def idle(self) -> float:
        """The median idle fraction."""
        return idle_share(self.tasks)


@dataclasses.dataclass(frozen=True)
class PipelineProfile:
    """The profile of a pipeline: its schedule and the timing of its tasks.

    Attributes:
        schedule: name of the schedule.
        num_micro_batches: M.
        stages: first and last layer, and fraction of the floating-point operations, of each stage.
        slots: tasks of each time slot, if every task takes one slot.
        bubble: idle fraction if all stages take equally long.
        in_flight: number of micro-batches that each stage stores according to the schedule.
        measured: the measured timing.
        simulated_idle: idle fraction if tasks took as long as measured, each stage had its own
            processor and communication took no time.
        padded: timing with tasks that sleep, so that all stages take equally long and do not
            compete for a processor; None on real devices.
    """

    schedule: str
    num_micro_batches: int
    stages: list[tuple[str, str, float]]
    slots: list[list[tuple[int, bool, int]]]
    bubble: float
    in_flight: list[int]
    measured: TimedSteps
    simulated_idle: float
    padded: TimedSteps | None

    @property
    def num_stages(self) -> int:
        """K."""
        return len(self.stages)


@dataclasses.dataclass(frozen=True)
class SplitProfile:
    """The profile of a split training.

    Attributes:
        traffic: traffic between devices in a step.
        held: memory of each device.
        pipeline: profile of a pipeline; None for other strategies.
    """

    traffic: Traffic
    held: list[HeldState]
    pipeline: PipelineProfile | None
