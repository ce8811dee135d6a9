"""Defines pipeline schedules: the order in which a stage processes its micro-batches.

A schedule is a list of tasks for each of K stages and M micro-batches, independent of the
computation and the device of a task. A stage can run the forward pass of a micro-batch after the
previous stage has, and the backward pass after the next stage has; until then it is idle. If all
stages take equally long, they are idle for (K - 1) / (M + K - 1) of the time in both schedules. The
schedules differ in the number of micro-batches whose activations a stage stores.
"""

import itertools
from collections.abc import Callable
from typing import NamedTuple


class Task(NamedTuple):
    """Represents one pass of one micro-batch through one stage.

    Attributes:
        stage: in 0 to K - 1.
        is_forward: whether this is the forward pass, else the backward pass.
        micro_batch: in 0 to M - 1.
    """

    stage: int
    is_forward: bool
    micro_batch: int


Schedule = Callable[[int, int, int], list[Task]]  # (stage, K, M) → tasks of the stage.


def gpipe(stage: int, num_stages: int, num_micro_batches: int) -> list[Task]:
    """Returns all forward passes, then all backward passes; a stage stores M micro-batches.

    Reference: Y. Huang et al., "GPipe: Efficient Training of Giant Neural Networks using Pipeline
        Parallelism", 2019.
    """
    return [
        Task(stage, is_forward, m) for is_forward in (True, False) for m in range(num_micro_batches)
    ]


def one_forward_one_backward(stage: int, num_stages: int, num_micro_batches: int) -> list[Task]:
    """Returns alternating forward and backward passes after a warm-up ("1F1B").

    A stage first runs one forward pass for each stage after it, so that none of them is idle; from
    then on each backward pass frees the memory for a forward pass. Stage k stores min(M, K - k)
    micro-batches.

    Reference: D. Narayanan et al., "PipeDream: Generalized Pipeline Parallelism for DNN Training",
        2019, in the variant with one update for all micro-batches ("PipeDream-Flush").
    """
    num_ahead = min(num_micro_batches, num_stages - 1 - stage)
    tasks = [Task(stage, True, m) for m in range(num_ahead)]
    for m in range(num_micro_batches - num_ahead):
        tasks += [Task(stage, True, num_ahead + m), Task(stage, False, m)]
    first_left = num_micro_batches - num_ahead
    return tasks + [Task(stage, False, m) for m in range(first_left, num_micro_batches)]


SCHEDULES: dict[str, Schedule] = {"gpipe": gpipe, "1f1b": one_forward_one_backward}


def in_time_slots(schedule: Schedule, num_stages: int, num_micro_batches: int) -> list[list[Task]]:
    """Returns the tasks of all stages by time slot, if every task takes one slot.

    In a slot, each stage runs the next task of its list if the tasks that it needs are done.

    Returns:
        For each slot its tasks, at most one per stage; a stage without a task is idle.
    """
    lists = [schedule(k, num_stages, num_micro_batches) for k in range(num_stages)]
    done: set[Task] = set()
    slots: list[list[Task]] = []
    while any(lists):
        slots.append([tasks[0] for tasks in lists if tasks and needs(tasks[0], num_stages) <= done])
        if not slots[-1]:
            raise ValueError("every stage of this schedule waits for another one")
        for task in slots[-1]:
            lists[task.stage].pop(0)
        done.update(slots[-1])
    return slots


def in_order(schedule: Schedule, num_stages: int, num_micro_batches: int) -> list[Task]:
    """Returns the tasks of all stages, each after the tasks that it needs."""
    return list(itertools.chain(*in_time_slots(schedule, num_stages, num_micro_batches)))


def needs(task: Task, num_stages: int) -> set[Task]:
    """Returns the tasks that must be done before this one."""
    neighbour = task.stage - 1 if task.is_forward else task.stage + 1
    found = {task._replace(stage=neighbour)} if 0 <= neighbour < num_stages else set()
    return found if task.is_forward else {*found, task._replace(is_forward=True)}
