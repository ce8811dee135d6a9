"""Analyses the timing of pipeline tasks: idle time, micro-batches in flight, and theory."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from strategies.schedules import Task, needs


class TimedTask(NamedTuple):
    """A task with its times.

    Attributes:
        stage, is_forward, micro_batch: as in `Task`.
        start_sec: time at which the task had all inputs, relative to the start of the first task.
        end_sec: time at which the task had all outputs.
    """

    stage: int
    is_forward: bool
    micro_batch: int
    start_sec: float
    end_sec: float


def bubble(num_stages: int, num_micro_batches: int) -> float:
    """Returns the idle fraction of stages that take equally long."""
    return (num_stages - 1) / (num_micro_batches + num_stages - 1)


def idle_share(tasks: Sequence[TimedTask]) -> float:
    """Returns the fraction of the time, from the first start to the last end, without a task.

    The result is the mean over the stages.
    """
    num_stages = 1 + max(task.stage for task in tasks)
    whole = max(task.end_sec for task in tasks) - min(task.start_sec for task in tasks)
    busy = sum(task.end_sec - task.start_sec for task in tasks)
    return 1 - busy / (num_stages * whole)


def most_in_flight(tasks: Sequence[TimedTask]) -> list[int]:
    """Returns for each stage the largest number of micro-batches stored at the same time.

    A micro-batch is stored from the start of its forward pass to the end of its backward pass.
    """
    most = []
    for stage in range(1 + max(task.stage for task in tasks)):
        own = [task for task in tasks if task.stage == stage]
        events = [(t.start_sec, 1) if t.is_forward else (t.end_sec, -1) for t in own]
        alive, peak = 0, 0
        for _, change in sorted(events):  # At equal times, ends come first.
            alive += change
            peak = max(peak, alive)
        most.append(peak)
    return most


def theoretical_in_flight(schedule: str, num_stages: int, num_micro_batches: int) -> list[int]:
    """Returns the number of micro-batches that each stage stores according to the schedule."""
    if schedule == "gpipe":
        return [num_micro_batches] * num_stages
    return [min(num_micro_batches, num_stages - stage) for stage in range(num_stages)]


def simulate(
    order: Sequence[Task], num_stages: int, task_secs: Mapping[tuple[int, bool], float]
) -> list[TimedTask]:
    """Returns the times of tasks if each stage has its own processor and nothing else takes time.

    Args:
        order: the tasks of all stages, each after the tasks that it needs.
        num_stages: K.
        task_secs: (stage, is_forward) → seconds of such a task.
    """
    ends: dict[Task, float] = {}
    free = [0.0] * num_stages
    timed = []
    for task in order:
        start = max(free[task.stage], *(ends[needed] for needed in needs(task, num_stages)), 0.0)
        end = start + task_secs[task.stage, task.is_forward]
        ends[task] = free[task.stage] = end
        timed.append(TimedTask(*task, start, end))
    return timed


def mean_task_secs(tasks: Sequence[TimedTask]) -> dict[tuple[int, bool], float]:
    """Returns (stage, is_forward) → the mean seconds of such a task."""
    secs: dict[tuple[int, bool], list[float]] = {}
    for task in tasks:
        secs.setdefault((task.stage, task.is_forward), []).append(task.end_sec - task.start_sec)
    return {key: sum(values) / len(values) for key, values in secs.items()}
