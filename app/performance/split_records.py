"""What is found of a split training: what it sends, holds and waits for."""

import dataclasses
from collections.abc import Sequence

import numpy as np

from app.performance.pipeline_timeline import TimedTask, idle_share, most_in_flight


@dataclasses.dataclass(frozen=True)
class Traffic:
    """Bytes between devices in a step.

    Attributes:
        terms: name, formula and bytes of each kind of traffic, by formula.
        formula_bytes: of all of them; None where there is no formula.
        counted_bytes: of the tensors that cross devices in the graph; None where it does not show.
        input_bytes: of images, labels and numbers, counted.
        links: sender, receiver, bytes by formula and bytes counted, of each pair that sends.
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
    """What a device holds between two steps, in bytes."""

    device: str
    weights_bytes: int
    optimizer_bytes: int
    statistics_bytes: int


@dataclasses.dataclass(frozen=True)
class TimedSteps:
    """A pipeline's tasks, timed.

    Attributes:
        idle_shares: of each step that was timed.
        tasks: of the step with the median share.
        in_flight: for each stage the most micro-batches that it remembered.
    """

    idle_shares: list[float]
    tasks: list[TimedTask]
    in_flight: list[int]

    @classmethod
    def of(cls, steps: Sequence[list[TimedTask]]) -> "TimedSteps":
        """Summarises steps."""
        shares = [idle_share(tasks) for tasks in steps]
        middle = int(np.argsort(shares)[len(shares) // 2])
        most = np.max([most_in_flight(tasks) for tasks in steps], axis=0)
        return cls(shares, steps[middle], [int(number) for number in most])

    @property
    def idle(self) -> float:
        """The median share of idle time."""
        return idle_share(self.tasks)


@dataclasses.dataclass(frozen=True)
class PipelineProfile:
    """A pipeline: its schedule, and when its tasks ran.

    Attributes:
        schedule: its name.
        num_micro_batches: M.
        stages: first and last layer, and share of the floating-point operations, of each stage.
        slots: for each time slot its tasks, where every task takes one slot.
        bubble: idle share if all stages take equally long.
        in_flight: for each stage the micro-batches that it remembers, by the schedule.
        measured: as it is.
        simulated_idle: idle share if tasks took as long as measured, each stage had a processor to
            itself and nothing travelled.
        padded: with tasks that sleep, so that all stages take equally long and do not compete for
            a processor; None on real devices.
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
    """What a training sends, holds and waits for.

    Attributes:
        traffic: between devices in a step.
        held: by each device.
        pipeline: None for other strategies.
    """

    traffic: Traffic
    held: list[HeldState]
    pipeline: PipelineProfile | None
