"""Pipeline schedules: in which order a stage works on its micro-batches.

A schedule is a list of tasks for each stage; nothing here knows what a task computes, or where.
K stages take M micro-batches. A stage can work on a micro-batch forwards once the stage before it
has, and backwards once the stage after it has; until then it is idle. While stages take equally
long, they are idle for (K - 1) / (M + K - 1) of the time, in both schedules: what differs is how
many micro-batches a stage has to remember.
"""

import itertools
from collections.abc import Callable
from typing import NamedTuple


class Task(NamedTuple):
    """One pass of one micro-batch through one stage.

    Attributes:
        stage: in 0 to K - 1.
        is_forward: the forward pass, else the backward pass.
        micro_batch: in 0 to M - 1.
    """

    stage: int
    is_forward: bool
    micro_batch: int


Schedule = Callable[[int, int, int], list[Task]]  # Of stage, K and M.


def gpipe(stage: int, num_stages: int, num_micro_batches: int) -> list[Task]:
    """All forward passes, then all backward passes: a stage remembers M micro-batches.

    Reference: Y. Huang et al., "GPipe: Efficient Training of Giant Neural Networks using Pipeline
        Parallelism", 2019.
    """
    return [
        Task(stage, is_forward, m) for is_forward in (True, False) for m in range(num_micro_batches)
    ]


def one_forward_one_backward(stage: int, num_stages: int, num_micro_batches: int) -> list[Task]:
    """One pass forwards, one backwards in turn, as soon as a micro-batch has come back ("1F1B").

    A stage first takes as many micro-batches as there are stages after it, so that none of these
    waits; from then on each backward pass makes room for a forward pass. Stage k remembers
    min(M, K - k) micro-batches.

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
    """Returns the tasks of all stages slot by slot, where every task takes one slot.

    In a slot each stage does the next task of its list, if its neighbours have done what it needs.

    Returns:
        For each slot its tasks, at most one of each stage; an empty place is idle time.
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
    """Returns the tasks of all stages so that each comes after those that it needs."""
    return list(itertools.chain(*in_time_slots(schedule, num_stages, num_micro_batches)))


def needs(task: Task, num_stages: int) -> set[Task]:
    """Returns the tasks that have to be done before this one."""
    neighbour = task.stage - 1 if task.is_forward else task.stage + 1
    found = {task._replace(stage=neighbour)} if 0 <= neighbour < num_stages else set()
    return found if task.is_forward else {*found, task._replace(is_forward=True)}
